"""Views of an artifact for people: terminal, Markdown, HTML. All over the same rows."""
