//! Memory for bulk bytes that is used again: fresh pages cost more than what is done with them.
//! Knows nothing of what the bytes mean.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

/// Buffers below this size are left to the allocator, which is good at them, in bytes.
const POOLED_BUFFER_BYTES_MIN: usize = 64 << 10;

/// Most that is kept for later, in bytes: as many large operations as are under way at once.
const POOL_BYTES_MAX: usize = 16 << 20;

/// Room beyond what was asked for, as a factor, that a buffer may have.
const CAPACITY_FACTOR_MAX: usize = 4;

static BUFFER_POOL: Mutex<BufferPool> = Mutex::new(BufferPool {
    buffers: Vec::new(),
    bytes: 0,
});

struct BufferPool {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// Bytes whose memory goes back when they are dropped, in any form.
#[derive(Debug, Default)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// An empty buffer with room for so many bytes at least.
    pub fn with_capacity(bytes: usize) -> Self {
        let mut buffer = take_buffer(bytes);
        buffer.clear();
        Self(buffer)
    }

    /// So many bytes of any value: zeros, or what this process used the memory for before.
    pub fn with_unspecified_content(length: usize) -> Self {
        let mut buffer = take_buffer(length);
        buffer.resize(length, 0);
        Self(buffer)
    }

    /// A copy.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut buffer = Self::with_capacity(bytes.len());
        buffer.extend_from_slice(bytes);
        buffer
    }

    /// The same bytes, to be shared.
    pub fn freeze(self) -> Bytes {
        if self.0.is_empty() {
            return Bytes::new();
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        let room = buffer.capacity();
        if room < POOLED_BUFFER_BYTES_MIN {
            return;
        }
        let mut kept = BUFFER_POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + room <= POOL_BYTES_MAX {
            kept.bytes += room;
            kept.buffers.push(buffer);
        }
    }
}

/// The buffer that was used last among those that fit, or a new one.
fn take_buffer(bytes: usize) -> Vec<u8> {
    let room = bytes.next_power_of_two();
    if room < POOLED_BUFFER_BYTES_MIN {
        return Vec::with_capacity(bytes);
    }
    let fits = |buffer: &Vec<u8>| {
        (bytes..=room.saturating_mul(CAPACITY_FACTOR_MAX)).contains(&buffer.capacity())
    };
    let mut kept = BUFFER_POOL.lock().unwrap_or_else(PoisonError::into_inner);
    match kept.buffers.iter().rposition(fits) {
        Some(place) => {
            let buffer = kept.buffers.remove(place);
            kept.bytes -= buffer.capacity();
            buffer
        }
        None => Vec::with_capacity(room),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_within_a_bound() {
        let mut first = Buffer::with_capacity(1 << 20);
        first.extend_from_slice(&[7; 1 << 20]);
        let frozen = first.freeze();
        let (at, part) = (frozen.as_ptr(), frozen.slice(5..9));
        drop(frozen);
        assert_eq!(part[..], [7; 4], "kept as long as a part of it is used");
        drop(part);
        let again = Buffer::with_unspecified_content(1 << 20);
        assert_eq!((again.as_ptr(), again.len()), (at, 1 << 20));
        let small = Buffer::from_slice(b"small");
        assert_eq!(&small.freeze()[..], b"small");
        drop(
            (0..64)
                .map(|_| Buffer::with_unspecified_content(1 << 20))
                .collect::<Vec<_>>(),
        );
        let kept = BUFFER_POOL.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(kept.bytes <= POOL_BYTES_MAX);
        let room: usize = kept.buffers.iter().map(Vec::capacity).sum();
        assert_eq!(kept.bytes, room);
    }
}
