"""Files of web servers, and datasets of Hugging Face's hub.

In: http:// and https:// URLs of files, hf:// URIs. Out: the `Source` protocol. It owns redirects and signed URLs. Its
connections are those of the S3 reader.
"""
