//! Nodes that leave are emptied step by step. Which steps are possible says
//! `policy/replication/departures.rs`.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::replication::departures;
use crate::state::scheduler_state::State;

impl State {
    /// Brings data from nodes that leave to nodes that stay, as far as that is possible now.
    pub(crate) fn empty_leaving_nodes(&mut self) {
        if self.fleet.draining().next().is_none() && self.wanted_moves.is_empty() {
            return;
        }
        for job in departures::jobs_to_withdraw(View::new(self)) {
            self.commit(Decision::Withdraw { job });
        }
        for (volume, id) in departures::volumes_on_draining(View::new(self)) {
            if let Some(decision) = departures::judge_departure(View::new(self), volume, id) {
                self.commit(decision);
            }
        }
        let wanted: Vec<VolumeIndex> = self.wanted_moves.iter().copied().collect();
        for volume in wanted {
            if let Some(decision) = departures::judge_move(View::new(self), volume) {
                self.commit(decision);
            }
            if !departures::is_move_wanted(View::new(self), volume) {
                self.wanted_moves.remove(&volume);
            }
        }
    }

    /// A copy takes the place of a volume, which is deleted.
    pub(super) fn switch_to_copy(&mut self, volume: VolumeIndex, id: VolumeId, copy: VolumeId) {
        self.take_back_extracts(volume, id);
        self.retire(id);
        self.restore_volume(volume, copy);
        self.wanted_moves.remove(&volume);
    }

    /// A job cannot end on the node of its data before that leaves: its data are to move.
    pub(super) fn want_moved(&mut self, job: JobIndex, server: ServerId) {
        for (volume, _) in self.graph.mounted(job) {
            let is_cache = self.graph.volume(volume).is_cache;
            let is_there = self.volumes.live_at(volume, Some(server)).is_some();
            if !is_cache && is_there && !self.wanted_moves.contains(&volume) {
                self.wanted_moves.insert(volume);
            }
        }
    }
}
