# The types of message.py for Cython. Python does not need this file.
from qmq_client.wire cimport record as codec

cdef object _fields_of(object message, object new_id, object now_ms, object limits)
cpdef object fields_to_message(object values, object body_type=*)
cdef object _as_headers(object headers)
