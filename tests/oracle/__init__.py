"""Right answers from elsewhere: definitions in plain numpy, and logits computed by Hugging Face."""
