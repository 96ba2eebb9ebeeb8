"""The tests, in rooms that mirror those of the product.

`support/` has fakes, builders and scripts that several tests use; no test module imports another. `end_to_end/` has whole
jobs over several processes, `fuzz/` hostile bytes, `project/` the documents and the packaging, `compat/` other projects'
trainers (`make compat`). Real servers and daemons come from `testbed/`, which the benches use too.
"""
