# The types of record.py for Cython. Python does not need this file.
cimport cython
from qmq_client.wire cimport packing

cpdef bytes encode_key(object key)
cpdef bytes encode_tags(object tags, object limits)

@cython.locals(parts=list)
cpdef bytes encode_headers(object headers, object limits)

cpdef tuple decode_tags(bytes data, Py_ssize_t first, Py_ssize_t after)

@cython.locals(
    headers=list, position=Py_ssize_t, name_position=Py_ssize_t, name_bytes=Py_ssize_t,
    value_bytes=Py_ssize_t, value_position=Py_ssize_t, next_position=Py_ssize_t,
)
cpdef tuple decode_headers(bytes data, Py_ssize_t first, Py_ssize_t after, Py_ssize_t header_count)

cpdef str decode_key(bytes data, Py_ssize_t first, Py_ssize_t after)

@cython.locals(key=bytes, tags=bytes, headers=bytes, due=bytes, expires=bytes, head=bytes, record_bytes=Py_ssize_t)
cpdef object encode_fields(object values, object limits)

@cython.locals(
    record=bytes, position=Py_ssize_t, flags=Py_ssize_t, key_bytes=Py_ssize_t, tags_bytes=Py_ssize_t,
    headers_bytes=Py_ssize_t, header_count=Py_ssize_t, born_at_ms=cython.ulonglong,
    tags_position=Py_ssize_t, headers_position=Py_ssize_t, body_position=Py_ssize_t, after_headers=Py_ssize_t,
)
cpdef object decode_fields(object subject, object data)
