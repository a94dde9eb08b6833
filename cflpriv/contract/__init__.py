"""What algorithms are written against: the operations of a federation, handles, calls of means, protections by name, the transcript.

operations         the operations with which server code computes on clients' data
handles            opaque handles to values that the server must not see
transformed_parts  parts of sums under a transform
calls              one call of `mean`
protection         the section `[protection]`
transcript         every message that crosses a trust boundary
"""
