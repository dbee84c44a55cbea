"""What a request passes on its way in and out: text to tokens, outputs put together, tokens to text."""
