//! The record of a small file that came home, as a line of text with its own checksum. Knows no
//! log and no file.

use bafs_proto::hash::Digest;
use bafs_proto::message::PutReceipt;
use bafs_proto::time::Time;

/// Digits of the checksum of a line.
const CHECK_DIGITS: usize = 16;

/// What is decided about a small file: it has its name, or gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SmallFileRecord {
    pub(super) receipt: PutReceipt,
    /// The name of its bytes until they have their own; never used again.
    pub(super) temporary: String,
    pub(super) time: Time,
}

impl SmallFileRecord {
    /// The line that is written of it.
    pub(super) fn line(&self) -> String {
        let PutReceipt {
            extraction: extract,
            path,
            size,
            digest,
        } = &self.receipt;
        let (time, temporary) = (self.time.0, &self.temporary);
        // Quoted as JSON: a path may have spaces and ends of lines.
        let path = serde_json::Value::from(path.as_str());
        let text = format!("{extract} {time} {size} {digest} {temporary} {path}");
        format!("{} {text}\n", check(&text))
    }

    /// A line as it was written; `None` when it is not whole.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
        let (digits, text) = line.split_once(' ')?;
        if digits != check(text) {
            return None;
        }
        let mut words = text.splitn(6, ' ');
        let mut next = || words.next();
        let (extract, time) = (next()?.parse().ok()?, Time(next()?.parse().ok()?));
        let (size, digest) = (next()?.parse().ok()?, parse_digest(next()?)?);
        let temporary = next()?.to_owned();
        let path = serde_json::from_str(next()?).ok()?;
        let receipt = PutReceipt {
            extraction: extract,
            path,
            size,
            digest,
        };
        Some(Self {
            receipt,
            temporary,
            time,
        })
    }
}

fn check(text: &str) -> String {
    let mut digits = Digest::of(text.as_bytes()).to_string();
    digits.truncate(CHECK_DIGITS);
    digits
}

fn parse_digest(text: &str) -> Option<Digest> {
    let mut digest = Digest([0; 32]);
    if text.len() != 2 * digest.0.len() {
        return None;
    }
    for (at, byte) in digest.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(digest)
}
