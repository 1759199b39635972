# The C version of packing.py for compiled modules. For unusual values it calls the Python version, so that
# errors have the same words.
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__x86_64__) && defined(__GNUC__)
    #include <nmmintrin.h>
    static int qmq_has_crc(void) { return __builtin_cpu_supports("sse4.2"); }
    __attribute__((target("sse4.2")))
    static uint32_t qmq_crc(uint32_t seed, const unsigned char *data, Py_ssize_t length) {
        uint64_t value = seed ^ 0xFFFFFFFFu, word;
        uint32_t last;
        for (; length >= 8; data += 8, length -= 8) {
            memcpy(&word, data, 8);
            value = _mm_crc32_u64(value, word);
        }
        for (last = (uint32_t)value; length; length--) last = _mm_crc32_u8(last, *data++);
        return last ^ 0xFFFFFFFFu;
    }
    #else
    static int qmq_has_crc(void) { return 0; }
    static uint32_t qmq_crc(uint32_t seed, const unsigned char *data, Py_ssize_t length) { return 0; }
    #endif
    static void qmq_put(unsigned char *to, uint64_t value, int bytes) {
        while (bytes--) { to[bytes] = (unsigned char)value; value >>= 8; }
    }
    static uint64_t qmq_get(const unsigned char *from, int bytes) {
        uint64_t value = 0;
        while (bytes--) value = value << 8 | *from++;
        return value;
    }
    """
    bint qmq_has_crc() noexcept
    uint32_t qmq_crc(uint32_t, const unsigned char *, Py_ssize_t) noexcept
    void qmq_put(unsigned char *, uint64_t, int) noexcept
    uint64_t qmq_get(const unsigned char *, int) noexcept
    # Up to this length a checksum takes less time here than a call of fastcrc.
    enum: QMQ_SHORT "2048"


cdef inline object pack_head(
    object message_id, object flags, Py_ssize_t key_bytes, Py_ssize_t tags_bytes,
    Py_ssize_t headers_bytes, Py_ssize_t header_count, object born_at_ms,
):
    cdef unsigned char *to
    cdef int overflows = 0
    cdef long bits = PyLong_AsLongAndOverflow(flags, &overflows) if isinstance(flags, int) else -1
    if not (
        PyBytes_CheckExact(message_id) and PyBytes_GET_SIZE(message_id) == 16
        and 0 <= bits <= 15 and not overflows
        and key_bytes <= 0xFF and tags_bytes <= 0xFFFF and headers_bytes <= 0xFFFF
        and header_count <= 0xFFFF and PyLong_CheckExact(born_at_ms)
    ):
        from qmq_client.wire import packing as general

        return general.pack_head(
            message_id, flags, key_bytes, tags_bytes, headers_bytes, header_count, born_at_ms
        )
    packed = PyBytes_FromStringAndSize(NULL, 32)
    to = <unsigned char *>PyBytes_AS_STRING(packed)
    memcpy(to, PyBytes_AS_STRING(message_id), 16)
    to[16] = <unsigned char>bits
    to[17] = key_bytes
    qmq_put(to + 18, tags_bytes, 2)
    qmq_put(to + 20, headers_bytes, 2)
    qmq_put(to + 22, header_count, 2)
    qmq_put(to + 24, born_at_ms, 8)
    return packed


cdef inline (int, int, int, int, int, uint64_t) unpack_head(bytes data) noexcept:
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(data)
    return (
        at[20], at[21], qmq_get(at + 22, 2), qmq_get(at + 24, 2), qmq_get(at + 26, 2),
        qmq_get(at + 28, 8),
    )


cdef inline bytes pack_pair(Py_ssize_t name_bytes, Py_ssize_t value_bytes):
    cdef unsigned char packed[3]
    packed[0] = name_bytes
    qmq_put(packed + 1, value_bytes, 2)
    return PyBytes_FromStringAndSize(<char *>packed, 3)


cdef inline (Py_ssize_t, Py_ssize_t) unpack_pair(bytes data, Py_ssize_t position) noexcept:
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(data) + position
    return (at[0], qmq_get(at + 1, 2))


cdef inline object seal(object seed, bytes head, object body):
    cdef Py_ssize_t head_bytes = PyBytes_GET_SIZE(head), length
    cdef unsigned char *to
    if not PyBytes_CheckExact(body) or PyBytes_GET_SIZE(body) > QMQ_SHORT or not qmq_has_crc():
        from qmq_client.wire import packing as general

        return general.seal(seed, head, body)
    length = 4 + head_bytes + PyBytes_GET_SIZE(body)
    sealed = PyBytes_FromStringAndSize(NULL, length)
    to = <unsigned char *>PyBytes_AS_STRING(sealed)
    memcpy(to + 4, PyBytes_AS_STRING(head), head_bytes)
    memcpy(to + 4 + head_bytes, PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body))
    qmq_put(to, qmq_crc(seed, to + 4, length - 4), 4)
    return sealed


cdef inline bint is_sealed(object seed, bytes data) except -1:
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
    if length > QMQ_SHORT or not qmq_has_crc():
        from qmq_client.wire import packing as general

        return general.is_sealed(seed, data)
    return qmq_crc(seed, at + 4, length - 4) == qmq_get(at, 4)
