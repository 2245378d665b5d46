"""What is computed: a GPT over flat tokens, its parameter table, presets and sampling."""
