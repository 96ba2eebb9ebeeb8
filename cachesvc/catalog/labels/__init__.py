"""Labels and searchable tags of samples.

In: class folders, tables of labels, and small sidecar files beside the data. Out: the labels and tags of a draft. It owns
the rules that turn texts and numbers into classes, regression targets and tags.
"""
