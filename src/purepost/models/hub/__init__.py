"""Models in and out: Hugging Face directories, hub ids, GGUF files and adapters."""
