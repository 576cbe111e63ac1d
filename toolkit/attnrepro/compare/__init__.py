"""Comparing: statistics over launches, differences of repeatables, and what explains them."""
