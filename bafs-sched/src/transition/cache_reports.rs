//! What nodes tell of their parts of caches.

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::action::Action;
use crate::policy::View;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;

impl State {
    /// Another reader of a cache is done: perhaps its parts are asked what they got once more.
    pub(crate) fn inspect_cache(&mut self, volume: VolumeIndex) {
        let parts = View::new(self).parts_to_inspect(volume).into_iter();
        let inspect = |(id, server)| Action::InspectCache { id, server };
        self.out.extend(parts.map(inspect));
    }

    /// A part of a cache got so many bytes once more since its node started.
    pub(crate) fn note_refetched(&mut self, id: VolumeId, bytes: u64) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let again = self.cache_statistics.refetched.note(volume, id, bytes);
        let Some(text) = View::new(self).describe_refetch(volume, again) else {
            return;
        };
        self.cache_statistics.refetched.parts.remove(&volume);
        self.cache_statistics.refetched.told.insert(volume);
        self.tell(RunWarning {
            job: None,
            volume: Some(volume),
            node: None,
            text,
        });
    }
}
