"""Writes the tokens of a dataset's rows as files that the format `tokens` reads, one document for each row.

In: a dataset of text, and a tokenizer of Hugging Face. Out: a folder of Megatron's `.bin` and `.idx`. It owns the worker
processes that tokenise and the folder while they run. `cachesvc tokenize` starts it as a process of its own.
"""
