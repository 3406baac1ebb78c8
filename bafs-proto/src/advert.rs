//! What a server says of itself to the catalog: a fixed head, and an open list of attributes.
//! Decides nothing and does no I/O.

use serde::{Deserialize, Serialize};

use crate::attributes::{AttributeValue, Attributes};
use crate::hash::Digest;
use crate::ids::{ServerId, VolumeId};

/// What a server is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    /// Holds the user's own data.
    Home,
    /// Holds volumes, and runs jobs if it has slots.
    Node,
}

/// What a server says of itself to the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advert {
    /// The server.
    pub id: ServerId,
    /// What it is for.
    pub kind: ServerKind,
    /// Name for people; a home is found by it (`bafs://NAME/…`).
    pub name: String,
    /// Where it listens, `host:port`.
    pub address: String,
    /// Servers of one group share cooperative caches.
    pub group: String,
    /// The advert is forgotten this long after it arrived, in milliseconds.
    pub ttl_ms: u64,
    /// Space for volumes, in bytes.
    pub capacity_bytes: u64,
    /// Space for volumes, in files.
    pub capacity_files: u64,
    /// Unreserved space, in bytes.
    pub free_bytes: u64,
    /// Unreserved space, in files.
    pub free_files: u64,
    /// Jobs it can run at once.
    pub slots: u32,
    /// Jobs it runs now.
    pub jobs: u32,
    /// Cooperative caches it takes part in.
    pub caches: Vec<CacheAdvert>,
    /// Until when it lives.
    pub lifetime: Lifetime,
    /// What else it says of itself: the machine's as measured, and those of its administrator.
    pub attributes: Attributes,
}

/// Names of the fields of an advert that are attributes too.
pub const HEAD_ATTRIBUTES: [&str; 12] = [
    "name",
    "address",
    "group",
    "capacity_bytes",
    "capacity_files",
    "free_bytes",
    "free_files",
    "slots",
    "jobs",
    "caches",
    "is_draining",
    "left_ms",
];

impl Advert {
    /// The value of an attribute. Its fields ([`HEAD_ATTRIBUTES`]) go before the list;
    /// `caches` are the names of its cooperative caches.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<AttributeValue> {
        let integer =
            |value: u64| AttributeValue::Integer(i64::try_from(value).unwrap_or(i64::MAX));
        let text = |text: &String| AttributeValue::Text(text.clone());
        let value = match name {
            "name" => text(&self.name),
            "address" => text(&self.address),
            "group" => text(&self.group),
            "capacity_bytes" => integer(self.capacity_bytes),
            "capacity_files" => integer(self.capacity_files),
            "free_bytes" => integer(self.free_bytes),
            "free_files" => integer(self.free_files),
            "slots" => integer(self.slots.into()),
            "jobs" => integer(self.jobs.into()),
            "caches" => {
                let names = self.caches.iter().map(|cache| cache.cooperative.clone());
                AttributeValue::TextList(names.collect())
            }
            "left_ms" => integer(self.lifetime.left_ms?),
            "is_draining" => AttributeValue::Boolean(self.lifetime.is_draining),
            _ => return self.attributes.get(name).cloned(),
        };
        Some(value)
    }
}

/// Until when a node lives, by its own account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    /// Time left for jobs, in milliseconds: until the node drains; once it drains, until it ends.
    /// `None` if the node knows no end.
    pub left_ms: Option<u64>,
    /// Whether it takes no new work, and lets others copy what only it has.
    pub is_draining: bool,
}

/// A cooperative cache, as one server holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheAdvert {
    /// Name of the cooperative cache.
    pub cooperative: String,
    /// The volume here.
    pub volume: VolumeId,
    /// State of the source that it shows: only equal ones share blocks.
    pub manifest: Digest,
    /// Most bytes it keeps.
    pub capacity_bytes: u64,
    /// Bytes it keeps now.
    pub used_bytes: u64,
}
