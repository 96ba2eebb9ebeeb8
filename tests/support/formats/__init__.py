"""Writers of stored formats, of our own: the compressed chunks of litData, the records of TensorFlow."""
