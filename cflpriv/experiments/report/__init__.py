"""Reports: one page of a run, of a sweep, of an audit, of another system's updates; fronts and tables."""
