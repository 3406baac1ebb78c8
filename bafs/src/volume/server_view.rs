//! Servers as `bafs servers --json` shows them: as their adverts, with ids as text. Some programs
//! read no number of 64 bits exactly.

use bafs_proto::attributes::Attributes;
use bafs_proto::message::{Advert, CacheAdvert, Lifetime, ServerKind};
use serde::Serialize;

/// An advert; the fields keep its order.
#[derive(Debug, Serialize)]
pub(super) struct ServerView<'a> {
    id: String,
    kind: ServerKind,
    name: &'a str,
    address: &'a str,
    group: &'a str,
    ttl_ms: u64,
    capacity_bytes: u64,
    capacity_files: u64,
    free_bytes: u64,
    free_files: u64,
    slots: u32,
    jobs: u32,
    caches: Vec<CacheView<'a>>,
    lifetime: Lifetime,
    attributes: &'a Attributes,
}

#[derive(Debug, Serialize)]
struct CacheView<'a> {
    cooperative: &'a str,
    volume: String,
    manifest: String,
    capacity_bytes: u64,
    used_bytes: u64,
}

impl<'a> ServerView<'a> {
    /// The view of an advert.
    pub(super) fn of(advert: &'a Advert) -> Self {
        Self {
            id: advert.id.to_string(),
            kind: advert.kind,
            name: &advert.name,
            address: &advert.address,
            group: &advert.group,
            ttl_ms: advert.ttl_ms,
            capacity_bytes: advert.capacity_bytes,
            capacity_files: advert.capacity_files,
            free_bytes: advert.free_bytes,
            free_files: advert.free_files,
            slots: advert.slots,
            jobs: advert.jobs,
            caches: advert.caches.iter().map(CacheView::of).collect(),
            lifetime: advert.lifetime,
            attributes: &advert.attributes,
        }
    }
}

impl<'a> CacheView<'a> {
    fn of(cache: &'a CacheAdvert) -> Self {
        Self {
            cooperative: &cache.cooperative,
            volume: cache.volume.to_string(),
            manifest: cache.manifest.to_string(),
            capacity_bytes: cache.capacity_bytes,
            used_bytes: cache.used_bytes,
        }
    }
}
