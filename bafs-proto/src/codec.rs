//! Bounded encoding of headers, and of what is too long for them; the only user of bincode.
//!
//! Integers have fixed width, lengths are checked against the limit ([`HEAD_BYTES_MAX`]) before
//! anything is allocated, and trailing bytes are refused.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorCode, Result};
use crate::limits::{BODY_BYTES_MAX, HEAD_BYTES_MAX};

const HEAD: usize = HEAD_BYTES_MAX as usize;
const BODY: usize = BODY_BYTES_MAX as usize;

const fn config<const LIMIT: usize>() -> Configuration<LittleEndian, Fixint, Limit<LIMIT>> {
    bincode::config::standard()
        .with_fixed_int_encoding()
        .with_limit::<LIMIT>()
}

/// Encodes a header.
///
/// # Errors
/// `Malformed` when the header would be longer than the limit.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    encode_within::<HEAD, T>(value, "header")
}

/// Decodes a header that must fill `bytes` exactly.
///
/// # Errors
/// `Malformed` when the bytes are no such header, lie about a length, or go on after it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    decode_within::<HEAD, T>(bytes, "header")
}

/// Encodes a body.
///
/// # Errors
/// `Malformed` when the body would be longer than [`BODY_BYTES_MAX`].
pub(crate) fn encode_body<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    encode_within::<BODY, T>(value, "body")
}

/// Decodes a body that must fill `bytes` exactly.
///
/// # Errors
/// `Malformed` when the bytes are no such body, lie about a length, or go on after it.
pub(crate) fn decode_body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    decode_within::<BODY, T>(bytes, "body")
}

fn encode_within<const LIMIT: usize, T: Serialize>(value: &T, part: &str) -> Result<Vec<u8>> {
    let bytes = bincode::serde::encode_to_vec(value, config::<LIMIT>())
        .map_err(|e| malformed(&format!("{part} does not encode: {e}")))?;
    if bytes.len() > LIMIT {
        return Err(malformed(&format!("{part} is longer than the limit")));
    }
    Ok(bytes)
}

fn decode_within<const LIMIT: usize, T: DeserializeOwned>(bytes: &[u8], part: &str) -> Result<T> {
    if bytes.len() > LIMIT {
        return Err(malformed(&format!("{part} is longer than the limit")));
    }
    let (value, used) = bincode::serde::decode_from_slice(bytes, config::<LIMIT>())
        .map_err(|e| malformed(&format!("{part} does not decode: {e}")))?;
    if used != bytes.len() {
        return Err(malformed(&format!("bytes follow the {part}")));
    }
    Ok(value)
}

fn malformed(text: &str) -> Error {
    Error::new(ErrorCode::Malformed, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Hello, Request, Role};

    #[test]
    fn hello_bytes_are_frozen() {
        let hello = Hello {
            version: 1,
            cluster: 0x1122_3344_5566_7788,
            role: Role::Agent,
        };
        let bytes = encode(&hello).expect("hello encodes");
        let frozen = [
            1, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 2, 0, 0, 0,
        ];
        assert_eq!(bytes, frozen);
        assert_eq!(decode::<Hello>(&frozen), Ok(hello));
    }

    #[test]
    fn trailing_bytes_and_lying_lengths_are_refused() {
        let mut bytes = encode(&7u32).expect("number encodes");
        bytes.push(0);
        assert!(decode::<u32>(&bytes).is_err());
        let lie = u64::MAX.to_le_bytes();
        assert!(decode::<Vec<u8>>(&lie).is_err());
        assert!(decode::<String>(&lie).is_err());
    }

    proptest::proptest! {
        #[test]
        fn decoding_garbage_never_panics(bytes: Vec<u8>) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<crate::message::ReplyHead>(&bytes);
        }
    }
}
