//! Packets of SFTP version 3: written and read, every length checked. Sends nothing.

use bafs_proto::path::to_bytes;
use bafs_proto::{Error, ErrorCode, Result};

/// Requests, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SftpRequestKind {
    Init = 1,
    Open = 3,
    Close = 4,
    Read = 5,
    Write = 6,
    Fstat = 8,
    Fsetstat = 10,
    Opendir = 11,
    Readdir = 12,
    Remove = 13,
    Mkdir = 14,
    Stat = 17,
    Rename = 18,
    Readlink = 19,
    Extended = 200,
}

const VERSION: u8 = 2;
const STATUS: u8 = 101;
const HANDLE: u8 = 102;
const DATA: u8 = 103;
const NAME: u8 = 104;
const ATTRS: u8 = 105;

/// Numbers of [`SftpReply::Status`].
pub(super) const OK: u32 = 0;
const END: u32 = 1;
const NO_SUCH_FILE: u32 = 2;
const PERMISSION_DENIED: u32 = 3;
const UNSUPPORTED: u32 = 8;

/// Fields of attributes that are there.
const WITH_SIZE: u32 = 1;
const WITH_OWNER: u32 = 2;
const WITH_MODE: u32 = 4;
const WITH_TIMES: u32 = 8;
const WITH_MORE: u32 = 1 << 31;

/// A request in the making.
pub(super) struct SftpPacket(Vec<u8>);

impl SftpPacket {
    pub(super) fn new(kind: SftpRequestKind, id: u32) -> Self {
        let mut packet = Self(vec![0, 0, 0, 0, kind as u8]);
        packet.number(id);
        packet
    }

    pub(super) fn hello(version: u32) -> Self {
        Self::new(SftpRequestKind::Init, version)
    }

    pub(super) fn number(&mut self, number: u32) -> &mut Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(super) fn long(&mut self, number: u64) -> &mut Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.0.extend(bytes);
        self
    }

    /// A text, or a path whose text has bytes.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(&to_bytes(text))
    }

    /// Attributes that say nothing but permission bits, or nothing at all.
    pub(super) fn mode(&mut self, mode: Option<u32>) -> &mut Self {
        match mode {
            Some(mode) => self.number(WITH_MODE).number(mode),
            None => self.number(0),
        }
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - 4).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

/// Attributes of a file; what the server does not say is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SftpAttributes {
    pub(super) size: u64,
    /// Kind and permission bits.
    pub(super) mode: u32,
    /// Seconds since the Unix epoch.
    pub(super) mtime_s: u32,
}

/// What a server answers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SftpReply {
    Status(u32, String),
    Handle(Vec<u8>),
    Data(Vec<u8>),
    Names(Vec<(Vec<u8>, SftpAttributes)>),
    Attributes(SftpAttributes),
}

impl SftpReply {
    /// The extensions in a greeting of this version.
    pub(super) fn parse_greeting(body: &[u8], version: u32) -> Option<Vec<String>> {
        let mut rest = PacketReader(body);
        if rest.byte()? != VERSION || rest.number()? < version {
            return None;
        }
        let mut extensions = Vec::new();
        while !rest.0.is_empty() {
            extensions.push(String::from_utf8_lossy(rest.bytes()?).into_owned());
            rest.bytes()?;
        }
        Some(extensions)
    }

    /// A reply with the number of its request; `None` when it is none.
    pub(super) fn parse(body: Vec<u8>) -> Option<(u32, Self)> {
        let mut rest = PacketReader(&body);
        let (kind, id) = (rest.byte()?, rest.number()?);
        let reply = match kind {
            STATUS => {
                let code = rest.number()?;
                // Old servers send no text.
                let text = rest.bytes().unwrap_or_default();
                Self::Status(code, String::from_utf8_lossy(text).into_owned())
            }
            HANDLE => Self::Handle(rest.bytes()?.to_vec()),
            DATA => Self::Data(rest.bytes()?.to_vec()),
            NAME => {
                let mut names = Vec::new();
                for _ in 0..rest.number()? {
                    let name = rest.bytes()?.to_vec();
                    rest.bytes()?;
                    names.push((name, rest.attributes()?));
                }
                Self::Names(names)
            }
            ATTRS => Self::Attributes(rest.attributes()?),
            _ => return None,
        };
        Some((id, reply))
    }

    pub(super) fn check_status(self) -> Result<()> {
        match self {
            Self::Status(OK, _) => Ok(()),
            other => Err(other.unexpected_error()),
        }
    }

    pub(super) fn handle(self) -> Result<Vec<u8>> {
        match self {
            Self::Handle(handle) => Ok(handle),
            other => Err(other.unexpected_error()),
        }
    }

    pub(super) fn attributes(self) -> Result<SftpAttributes> {
        match self {
            Self::Attributes(attributes) => Ok(attributes),
            other => Err(other.unexpected_error()),
        }
    }

    /// Data; empty at the end of the file.
    pub(super) fn data(self) -> Result<Vec<u8>> {
        match self {
            Self::Data(data) => Ok(data),
            Self::Status(END, _) => Ok(Vec::new()),
            other => Err(other.unexpected_error()),
        }
    }

    /// Names; none at the end of the directory.
    pub(super) fn names(self) -> Result<Vec<(Vec<u8>, SftpAttributes)>> {
        match self {
            Self::Names(names) => Ok(names),
            Self::Status(END, _) => Ok(Vec::new()),
            other => Err(other.unexpected_error()),
        }
    }

    fn unexpected_error(self) -> Error {
        match self {
            Self::Status(NO_SUCH_FILE, _) => Error::new(ErrorCode::NotFound, "no such file"),
            Self::Status(PERMISSION_DENIED, _) => {
                Error::new(ErrorCode::RightMissing, "permission refused")
            }
            Self::Status(UNSUPPORTED, text) => Error::new(
                ErrorCode::Unsupported,
                format!(
                    "it does not support the operation: \
                    {text}"
                ),
            ),
            Self::Status(code, text) => {
                Error::new(ErrorCode::ServerFault, format!("{text} (status {code})"))
            }
            _ => Error::new(ErrorCode::Malformed, "it sent an unexpected reply"),
        }
    }
}

/// What is left of a packet.
struct PacketReader<'a>(&'a [u8]);

impl<'a> PacketReader<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*number))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn attributes(&mut self) -> Option<SftpAttributes> {
        let flags = self.number()?;
        let mut found = SftpAttributes::default();
        if flags & WITH_SIZE != 0 {
            found.size = u64::from(self.number()?) << 32 | u64::from(self.number()?);
        }
        if flags & WITH_OWNER != 0 {
            self.number()?;
            self.number()?;
        }
        if flags & WITH_MODE != 0 {
            found.mode = self.number()?;
        }
        if flags & WITH_TIMES != 0 {
            self.number()?;
            found.mtime_s = self.number()?;
        }
        if flags & WITH_MORE != 0 {
            for _ in 0..self.number()? {
                self.bytes()?;
                self.bytes()?;
            }
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<u8> {
        let mut packet = SftpPacket::new(SftpRequestKind::Init, 7);
        packet.number(1).text("a").text("-rw a");
        packet.number(WITH_SIZE | WITH_OWNER | WITH_MODE | WITH_TIMES | WITH_MORE);
        packet.long(5 << 32).number(0).number(0).number(0o100_644);
        packet.number(1).number(9).number(1).text("x").text("y");
        let mut body = packet.finish().split_off(4);
        body[0] = NAME;
        body
    }

    #[test]
    fn names_are_parsed_with_their_attributes() {
        let attributes = SftpAttributes {
            size: 5 << 32,
            mode: 0o100_644,
            mtime_s: 9,
        };
        let reply = SftpReply::Names(vec![(b"a".to_vec(), attributes)]);
        assert_eq!(SftpReply::parse(names()), Some((7, reply)));
    }

    #[test]
    fn truncated_packets_are_refused() {
        let whole = names();
        for end in 0..whole.len() {
            assert_eq!(SftpReply::parse(whole[..end].to_vec()), None, "{end}");
        }
        assert_eq!(
            SftpReply::parse(vec![NAME, 0, 0, 0, 1, 255, 255, 255, 255]),
            None
        );
        assert_eq!(SftpReply::parse_greeting(&[VERSION, 0, 0, 0, 2], 3), None);
        assert_eq!(
            SftpReply::parse_greeting(&[VERSION, 0, 0, 0, 3], 3),
            Some(Vec::new())
        );
    }
}
