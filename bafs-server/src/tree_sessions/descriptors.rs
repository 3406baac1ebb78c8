//! How many files a writer may open before this server has: what was opened early and then cannot
//! be would cost its volume, so all of them together get no more than a part of the descriptors.
//! Sessions keep that part from what is opened in time. Opens nothing.

use std::sync::{PoisonError, RwLock};

use bafs_proto::limits::EARLY_HANDLES_MAX;
use bafs_tree::{ReservedDescriptors, Session, reservable_descriptors};
use rustix::process::{Resource, getrlimit};

/// Part of the process's descriptors that is kept for them; what is opened in time and what is
/// only referred to needs the rest.
const RESERVABLE_DIVISOR: u64 = 2;

/// Part of what is left of that, and of what is free, which one more session gets: so that later
/// ones get some too, and a job that comes late can open files in time.
const SESSION_DIVISOR: u64 = 4;

/// Has one more session keep descriptors as long as it lasts, where others keep `kept`.
pub(super) fn reserve_descriptors(
    session: &mut RwLock<Option<Session>>,
    kept: u64,
) -> ReservedDescriptors {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let share = session_share(limit, kept, reservable_descriptors());
    let session = session.get_mut().unwrap_or_else(PoisonError::into_inner);
    let kept = session
        .as_mut()
        .map(|session| session.reserve_descriptors(share));
    kept.unwrap_or_default()
}

fn session_share(limit: u64, kept: u64, free: u64) -> u32 {
    let share = (limit / RESERVABLE_DIVISOR).saturating_sub(kept).min(free) / SESSION_DIVISOR;
    u32::try_from(share).map_or(EARLY_HANDLES_MAX, |share| share.min(EARLY_HANDLES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_descriptors_never_exceed_half_the_limit() {
        for limit in [0, 20, 1_024, 20_000, u64::MAX] {
            let mut kept = 0;
            for _ in 0..4_096 {
                let one_more = u64::from(session_share(limit, kept, u64::MAX));
                assert!(one_more <= u64::from(EARLY_HANDLES_MAX));
                kept += one_more;
            }
            assert!(kept <= limit / 2, "{kept} of {limit}");
        }
        assert_eq!(
            session_share(1 << 20, 100 * u64::from(EARLY_HANDLES_MAX), u64::MAX),
            EARLY_HANDLES_MAX
        );
        assert!(
            session_share(20_000, 9_000, 2_000) > 0,
            "a later one gets some, too"
        );
    }

    #[test]
    fn sessions_leave_descriptors_free_for_synchronous_opens() {
        // What one greedy job leaves, and many sessions after it.
        let mut free = 200;
        for _ in 0..10 {
            free -= u64::from(session_share(3_000, 375, free));
            assert!(free > 0);
        }
        assert_eq!(session_share(3_000, 0, 0), 0);
        assert_eq!(session_share(20_000, 0, 12_000), EARLY_HANDLES_MAX);
    }
}
