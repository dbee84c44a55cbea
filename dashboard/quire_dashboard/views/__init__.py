"""The pages, one module each; its `show` draws the page."""
