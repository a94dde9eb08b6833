"""The interface for algorithms: the operations of a federation, handles, calls of means, protections by name, the transcript.

operations   the operations with which server code computes on clients' data
handles      opaque handles to values that the server must not see
calls        one call of `mean`
algorithm    the interface of an algorithm, and its declarations
protection   the section `[protection]`
transcript   every message that crosses a trust boundary
"""
