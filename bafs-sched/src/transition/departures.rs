//! Nodes that leave, step by step. Which steps are possible says
//! `policy/replication/departures.rs`.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::policy::replication::departures::{Departure, plan_departures};
use crate::state::scheduler_state::State;

impl State {
    /// Brings data from nodes that leave to nodes that stay, as far as that is possible now.
    pub(crate) fn empty_leaving_nodes(&mut self) {
        if self.fleet.draining().next().is_none() && self.wanted_moves.is_empty() {
            return;
        }
        for step in plan_departures(View::new(self)) {
            self.commit_departure(step);
        }
        let (volumes, fleet) = (&self.volumes, &self.fleet);
        self.wanted_moves.retain(|volume| {
            let there = volumes.scratch(*volume).and_then(|(_, server)| server);
            there.is_some_and(|server| fleet.departure(server).at.is_some())
        });
    }

    fn commit_departure(&mut self, step: Departure) {
        match step {
            Departure::WithdrawJob(job) => self.end_stopped(job),
            Departure::CopyVolume { source, target } => {
                // An earlier step may have taken the room.
                let size = self.size_of(source.volume);
                let has_room = self.fleet.available(target).can_hold(size);
                if has_room && !self.is_being_copied(source.volume) {
                    let older = self.older_copy(source.volume);
                    let base = older.filter(|(_, older)| older.server == Some(target));
                    let base = base.map(|(id, _)| id);
                    self.copy(source, target, base);
                }
            }
            Departure::UseCopy { volume, id } => self.use_copy(volume, id),
            Departure::DeleteVolume(id) => self.retire(id),
        }
    }

    fn use_copy(&mut self, volume: VolumeIndex, id: VolumeId) {
        self.take_back_extracts(volume, id);
        self.retire(id);
        self.restore(volume);
        self.wanted_moves.remove(&volume);
    }

    /// A job cannot end on the node of its data before that leaves: its data are to move.
    pub(crate) fn want_moved(&mut self, job: JobIndex, server: ServerId) {
        for (volume, _) in self.graph.mounted(job) {
            let is_cache = self.graph.volume(volume).is_cache;
            if !is_cache && self.volumes.live_at(volume, Some(server)).is_some() {
                self.wanted_moves.insert(volume);
            }
        }
    }
}
