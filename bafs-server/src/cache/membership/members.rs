//! The membership of one generation: its name, its placements, and how far its blocks have the
//! classes that follow from them. Sends nothing.

use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use bafs_proto::Result;
use bafs_proto::cache::CacheMember;
use bafs_proto::ids::ServerId;

use super::peers::CacheName;
use super::placement_view::{EARLIER_MAX, ExtentMap, FORMER_MAX, PlacementView};
use crate::cache::errors::run_blocking;
use crate::cache::locks::{lock, read_lock, write_lock};
use crate::cache::store::manifest::Manifest;
use crate::logic::blocks::BlockKey;
use crate::logic::rendezvous::Candidate;

/// Who shares a generation, and which blocks each member is the primary node of.
pub(crate) struct Membership {
    extents: Arc<ExtentMap>,
    /// Where the blocks are.
    view: RwLock<Option<Arc<PlacementView>>>,
    /// Members of earlier placements, as peers reported.
    reported_placements: Mutex<Vec<Vec<Candidate>>>,
    /// Held while a view is computed.
    computing: tokio::sync::Mutex<()>,
    pub(super) class_pass: Mutex<ClassPass>,
}

/// The pass that brings all classes up to date.
#[derive(Default)]
pub(super) struct ClassPass {
    /// The view and the version of the pins to which it brings them.
    pub(super) view: Option<Arc<PlacementView>>,
    pub(super) pins: u64,
    /// The next block; `None` when the pass has ended.
    pub(super) next: Option<BlockKey>,
}

impl Membership {
    /// Without other members. `cooperative` is the name of the cache; empty when it shares with
    /// nobody.
    pub(crate) fn new(manifest: Arc<Manifest>, cooperative: String) -> Self {
        Self {
            extents: Arc::new(ExtentMap::new(manifest, cooperative)),
            view: RwLock::default(),
            reported_placements: Mutex::default(),
            computing: tokio::sync::Mutex::default(),
            class_pass: Mutex::default(),
        }
    }

    /// Name of the cooperative cache; empty when it shares with nobody.
    pub(crate) fn cooperative(&self) -> &str {
        &self.extents.cooperative
    }

    /// Whether it is a cooperative cache.
    pub(crate) fn is_shared(&self) -> bool {
        !self.cooperative().is_empty()
    }

    /// Names this state of the cache.
    pub(crate) fn cache_name(&self) -> CacheName {
        let manifest = self.extents.manifest.digest();
        (self.cooperative().to_owned(), manifest)
    }

    /// Blocks of an extent.
    pub(crate) fn extent_blocks(&self) -> u64 {
        self.extents.extent_blocks()
    }

    /// The last view, if there was one.
    pub(crate) fn view_now(&self) -> Option<Arc<PlacementView>> {
        let view = read_lock(&self.view);
        view.clone()
    }

    /// The view of these members, where this server keeps at most `own_bytes`.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn view(
        self: &Arc<Self>,
        own: ServerId,
        own_bytes: u64,
        members: Vec<CacheMember>,
    ) -> Result<Arc<PlacementView>> {
        let current = || {
            let reported = self.reported_placements().len();
            let view = self.view_now();
            view.filter(|view| view.is_current(&members, reported))
        };
        if let Some(view) = current() {
            return Ok(view);
        }
        // Readers that wait here hold no thread: the threads are for reads.
        let _one_at_a_time = self.computing.lock().await;
        if let Some(view) = current() {
            return Ok(view);
        }
        let this = self.clone();
        let computed = run_blocking(move || {
            let reported = this.reported_placements().clone();
            let own = Candidate {
                server: own,
                weight: own_bytes,
            };
            let last = this.view_now();
            let extents = this.extents.clone();
            let view = PlacementView::compute(extents, own, members, last.as_deref(), &reported);
            let view = Arc::new(view);
            *write_lock(&this.view) = Some(view.clone());
            view
        });
        computed.await
    }

    /// Notes the members of earlier placements, as a peer reports.
    pub(super) fn note_former_placements(&self, former: Vec<Vec<(ServerId, u64)>>) {
        let mut reported = self.reported_placements();
        let former = former.into_iter().take(EARLIER_MAX);
        let fits = |servers: &Vec<_>| servers.len() <= FORMER_MAX;
        for servers in former.filter(fits).filter(|servers| !servers.is_empty()) {
            let candidate = |(server, weight)| Candidate { server, weight };
            let candidates: Vec<_> = servers.into_iter().map(candidate).collect();
            if reported.len() < EARLIER_MAX && !reported.contains(&candidates) {
                reported.push(candidates);
            }
        }
    }

    /// The members of all placements that this server knows, the latest first.
    pub(super) fn former_placements(&self) -> Vec<Vec<(ServerId, u64)>> {
        let view = self.view_now();
        let placements = view.iter().flat_map(|view| view.placements());
        let mut all: Vec<Vec<Candidate>> = placements.map(|p| p.candidates().to_vec()).collect();
        for candidates in self.reported_placements().iter() {
            if !all.contains(candidates) {
                all.push(candidates.clone());
            }
        }
        let pair = |candidate: &Candidate| (candidate.server, candidate.weight);
        let lists = all.iter().map(|list| list.iter().map(pair).collect());
        lists.collect()
    }

    fn reported_placements(&self) -> MutexGuard<'_, Vec<Vec<Candidate>>> {
        lock(&self.reported_placements)
    }
}
