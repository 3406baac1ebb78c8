//! Where pipelines are at home: when that begins, moves and ends. What they may take is
//! `policy/admission/bankers_check.rs`.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::View;
use crate::space::Space;
use crate::state::planned_volumes::Create;
use crate::state::scheduler_state::State;

impl State {
    /// Takes note of a start before it happens, and of the nodes that borrow room of others then.
    pub(crate) fn note_claims(
        &mut self,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
        borrows: Vec<(ServerId, Space)>,
    ) {
        self.claims.borrowing.extend(borrows);
        let is_scratch = |(volume, ..): &Create| !self.graph.volume(*volume).is_cache;
        if creates.iter().any(is_scratch) {
            let before = self.claims.home.insert(self.graph.pipeline(job), server);
            self.note_moved(before.into_iter().chain([server]));
        }
    }

    /// Space became free on a node: perhaps it borrows no more.
    pub(crate) fn settle_claims(&mut self, server: ServerId) {
        if self.claims.borrowing.contains_key(&server) {
            match View::new(self).lack_to_complete(server) {
                Some(lack) => drop(self.claims.borrowing.insert(server, lack)),
                None => drop(self.claims.borrowing.remove(&server)),
            }
            // Those who may borrow now wait anywhere.
            self.queues.wake_all();
        }
    }

    /// A node is lost: nothing of it borrows any more, and those who may borrow now wait anywhere.
    pub(crate) fn drop_claims(&mut self, server: ServerId) {
        if self.claims.borrowing.remove(&server).is_some() {
            self.queues.wake_all();
        }
    }

    /// A pipeline has ended for good, or its volumes were dropped.
    pub(crate) fn end_claims(&mut self, pipeline: u32) {
        let before = self.claims.home.remove(&pipeline);
        self.note_moved(before);
    }

    /// A pipeline is at home elsewhere from now on.
    fn note_moved(&mut self, servers: impl IntoIterator<Item = ServerId>) {
        for server in servers {
            self.volumes.changed.note(server);
        }
    }
}
