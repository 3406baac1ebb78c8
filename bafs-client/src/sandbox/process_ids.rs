//! Where the process ids of a job's name space begin: apart from those of other jobs on the
//! machine, because programs name files, locks and seeds after their process id. Starts no process.

use std::fs;
use std::io;
use std::path::Path;

/// The kernel gives no id below this one again once it has counted past it (`RESERVED_PIDS`).
const RESERVED_IDS: u32 = 300;

/// Lets the ids of this process' name space go on at a place of their own; the caller is its init.
///
/// `proc` is where a process list is mounted. `own` is the id that this process has on the host's
/// list, which no other live process has: the place follows from it.
pub(super) fn set_first_id(host_id: u32, proc: &Path) -> io::Result<()> {
    let limit = fs::read_to_string(proc.join("sys/kernel/pid_max"))?;
    let limit = limit.trim().parse().map_err(io::Error::other)?;
    let boot = fs::read(proc.join("sys/kernel/random/boot_id")).unwrap_or_default();
    let first = first_id(host_id, &boot, limit);
    // What is written is the id that was given last.
    fs::write(proc.join("sys/kernel/ns_last_pid"), (first - 1).to_string())
}

/// The id of this process as the agent's process list has it.
pub(super) fn own_id(proc: &Path) -> io::Result<u32> {
    let link = fs::read_link(proc.join("self"))?;
    let text = link.to_string_lossy();
    text.parse().map_err(io::Error::other)
}

/// Ids of processes that were started one after the other lie far apart: multiples of the golden
/// ratio fill a circle evenly, however many there are. `boot` differs between machines.
fn first_id(host_id: u32, boot: &[u8], limit: u32) -> u32 {
    let places = u64::from(limit.saturating_sub(RESERVED_IDS + 1).max(1));
    let step = (places * 618_034 / 1_000_000..)
        .find(|&step| greatest_common_divisor(step, places) == 1)
        .unwrap_or(1);
    let turn = boot.iter().fold(0, |turn: u64, &byte| {
        (turn * 257 + u64::from(byte)) % places
    });
    let place = (u64::from(host_id) * step + turn) % places;
    // Fits, as it is below the limit.
    RESERVED_IDS + 1 + place as u32
}

fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    match other {
        0 => one,
        _ => greatest_common_divisor(other, one % other),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn jobs_have_distant_first_ids() {
        for (limit, distance) in [(4_194_304, 1_500), (32_768, 10)] {
            // A hundred jobs, each of which starts ten processes on the host.
            let firsts: BTreeSet<u32> = (5_000..6_000)
                .step_by(10)
                .map(|own| first_id(own, b"boot", limit))
                .collect();
            assert_eq!(firsts.len(), 100);
            let pairs = firsts.iter().zip(firsts.iter().skip(1));
            let closest = pairs.map(|(one, other)| other - one).min();
            assert!(closest >= Some(distance), "{closest:?} of {limit}");
            assert!(firsts.iter().all(|&id| id > RESERVED_IDS && id < limit));
        }
    }

    #[test]
    fn live_processes_never_share_a_first_id() {
        let firsts: BTreeSet<u32> = (1..32_000).map(|own| first_id(own, b"", 32_768)).collect();
        assert_eq!(firsts.len(), 31_999);
    }

    #[test]
    fn machines_have_different_first_ids() {
        let of = |boot: &[u8]| first_id(1_000, boot, 4_194_304);
        assert_ne!(of(b"5f1c2f8e-1"), of(b"5f1c2f8e-2"));
    }
}
