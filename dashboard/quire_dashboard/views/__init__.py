"""The pages, one module each; `show` draws it."""
