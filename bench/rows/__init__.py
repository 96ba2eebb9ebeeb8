"""`python -m bench rows`: rows of each row format, warm, against the fastest readers of that format.

In: nothing; the rows are made from a seed. Out: a table of rows a second and ratios. It owns the folders that it writes.
"""
