//! Memory for bulk bytes that is used again: fresh pages cost more than what is done with them.
//! Knows nothing of what the bytes mean.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

/// Buffers below this size are left to the allocator, which is good at them, in bytes.
const KEPT_BYTES_MIN: usize = 64 << 10;

/// Most that is kept for later, in bytes: as many large operations as are under way at once.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// Room beyond what was asked for, as a factor, that a buffer may have.
const ROOM_MAX: usize = 4;

static SPARES: Mutex<Spares> = Mutex::new(Spares {
    buffers: Vec::new(),
    bytes: 0,
});

struct Spares {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// Bytes whose memory goes back when they are dropped, in any form.
#[derive(Debug, Default)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// An empty buffer with room for so many bytes at least.
    pub fn with_room(bytes: usize) -> Self {
        let mut buffer = take(bytes);
        buffer.clear();
        Self(buffer)
    }

    /// So many bytes of any value: zeros, or what this process used the memory for before.
    pub fn of_any(length: usize) -> Self {
        let mut buffer = take(length);
        buffer.resize(length, 0);
        Self(buffer)
    }

    /// A copy.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::with_room(bytes.len());
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
        if room < KEPT_BYTES_MIN {
            return;
        }
        let mut kept = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.bytes + room <= KEPT_BYTES_MAX {
            kept.bytes += room;
            kept.buffers.push(buffer);
        }
    }
}

/// The buffer that was used last among those that fit, or a new one.
fn take(bytes: usize) -> Vec<u8> {
    let room = bytes.next_power_of_two();
    if room < KEPT_BYTES_MIN {
        return Vec::with_capacity(bytes);
    }
    let fits =
        |buffer: &Vec<u8>| (bytes..=room.saturating_mul(ROOM_MAX)).contains(&buffer.capacity());
    let mut kept = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn memory_is_used_again_and_bounded() {
        let mut first = Buffer::with_room(1 << 20);
        first.extend_from_slice(&[7; 1 << 20]);
        let frozen = first.freeze();
        let (at, part) = (frozen.as_ptr(), frozen.slice(5..9));
        drop(frozen);
        assert_eq!(part[..], [7; 4], "kept as long as a part of it is used");
        drop(part);
        let again = Buffer::of_any(1 << 20);
        assert_eq!((again.as_ptr(), again.len()), (at, 1 << 20));
        let small = Buffer::copy_of(b"small");
        assert_eq!(&small.freeze()[..], b"small");
        drop((0..64).map(|_| Buffer::of_any(1 << 20)).collect::<Vec<_>>());
        let kept = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(kept.bytes <= KEPT_BYTES_MAX);
        let room: usize = kept.buffers.iter().map(Vec::capacity).sum();
        assert_eq!(kept.bytes, room);
    }
}
