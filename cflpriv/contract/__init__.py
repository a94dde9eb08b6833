"""The interface for algorithms: the operations of a federation, handles, calls of means, protections by name, the transcript.

operations   the operations by which server code gets at clients without holding their data
handles      what a server holds of things it must not see
calls        one call of `mean`
algorithm    what an algorithm is, and what it declares of itself
protection   the section `[protection]`
transcript   every message that crosses a trust boundary
"""
