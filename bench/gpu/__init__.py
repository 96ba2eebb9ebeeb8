"""`python -m bench.gpu FOLDER`: checks and measures everything that needs a CUDA device.

It needs PyTorch with CUDA, torchvision, this project with its daemon's dependencies, and nothing from a network: the data
is written to a temporary folder and served by a daemon from there. Results go to FOLDER/results.json and are printed.
Without a device it runs as far as a processor can: the same data, batches and training step.
"""
