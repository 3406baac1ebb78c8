//! What a run on a throw-away cluster tells otherwise than one on a cluster that stays: options
//! have other names there, and what nodes keep goes with them. Starts nothing.

use std::path::Path;

use bafs_sched::logic::{FREE_OR_OFFER_LESS, Outcome, RUN_ANEW};
use bafs_sched::report::RunReport;

use crate::rate::show_bytes;

/// What the scheduler advises for nodes that stay, and what helps here: the next run has another
/// cluster, and keeps no journal unless one is named.
const ADVICE: [(&str, &str); 2] = [
    (
        FREE_OR_OFFER_LESS,
        "free some of it, or give a smaller --node-size",
    ),
    (RUN_ANEW, "run it again"),
];

/// What the scheduler says of a result on a node that stays, up to the name of the node.
const STAYS: &str = "it stays on node ";

/// What it then advises, up to the id of the volume, or says of a file that cannot be sent at all.
const FETCH: [&str; 2] = ["bafs volume extract ", " after the run in volume "];

/// Words a report as it is right when the cluster is gone, whose files are in `kept` if they stay.
pub(super) fn reword(report: &mut RunReport, kept: Option<&Path>) {
    let mut texts: Vec<&mut String> = report.warnings.iter_mut().collect();
    if let Outcome::Failed { jobs, messages } = &mut report.outcome {
        texts.extend(jobs.iter_mut().map(|job| &mut job.reason));
        texts.extend(messages);
    }
    for text in texts {
        *text = reworded(text, kept);
    }
}

fn reworded(text: &str, kept: Option<&Path>) -> String {
    if let Some((what, node, volume)) = place_of_result(text) {
        return match kept {
            Some(kept) => format!(
                "{what}it is in {}/{node}/volumes/{volume}/tree",
                kept.display()
            ),
            None => format!("{what}it is lost with the throw-away cluster"),
        };
    }
    let here = |text: String, (there, here): (&str, &str)| text.replace(there, here);
    ADVICE.into_iter().fold(text.to_owned(), here)
}

/// What is told of a result before it is said where it stays, and on which node in which volume
/// that is.
fn place_of_result(text: &str) -> Option<(&str, &str, &str)> {
    let at = text.find(STAYS)?;
    let (what, stays) = text.split_at(at);
    let (node, _) = stays.strip_prefix(STAYS)?.split_once(" for ")?;
    let mut volumes = FETCH.iter().filter_map(|fetch| stays.split_once(fetch));
    let (_, volume) = volumes.next()?;
    Some((what, node, volume.split(' ').next()?))
}

/// What is wrong with nodes of this size beside each other on the disk of a directory, if
/// something is; `disk_bytes` is all that the disk has.
pub(super) fn too_much_offered(
    nodes: u32,
    size_bytes: u64,
    place: &Path,
    disk_bytes: u64,
) -> Option<String> {
    let offered = u128::from(nodes) * u128::from(size_bytes);
    let all = u128::from(disk_bytes);
    (offered > all).then(|| {
        format!(
            "the nodes offer {} together, but the disk of {} has {} in all, and jobs will meet \
             its end: give a smaller --node-size, or name a directory of a larger disk in TMPDIR",
            show_bytes(offered),
            place.display(),
            show_bytes(all)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_option_of_this_command() {
        let told =
            format!("the disk of node n1 was full 9 times; {FREE_OR_OFFER_LESS}; then {RUN_ANEW}");
        let told = reworded(&told, None);
        assert!(
            told.ends_with("free some of it, or give a smaller --node-size; then run it again"),
            "{told}"
        );
    }

    #[test]
    fn a_result_that_stays_is_where_the_files_of_the_cluster_are() {
        let told = "file 'out' of volume 'w' could not be sent to bafs://home/out: no; it stays on \
                    node n2 for 7 days after the run; mend the cause, then: bafs volume extract \
                    0af3 out bafs://home/out";
        let kept = reworded(told, Some(Path::new("/tmp/bafs-cluster-1-a")));
        let before = "file 'out' of volume 'w' could not be sent to bafs://home/out: no; ";
        let place = "it is in /tmp/bafs-cluster-1-a/n2/volumes/0af3/tree";
        assert_eq!(kept, format!("{before}{place}"));
        let lost = reworded(told, None);
        assert_eq!(
            lost,
            format!("{before}it is lost with the throw-away cluster")
        );
        let fifo = format!("{before}it stays on node n2 for 7 days after the run in volume 0af3");
        assert_eq!(reworded(&fifo, None), lost);
        let kept_fifo = reworded(&fifo, Some(Path::new("/tmp/bafs-cluster-1-a")));
        assert_eq!(kept_fifo, kept);
    }

    #[test]
    fn nodes_share_the_disk_of_this_machine() {
        let offered = |nodes, size| too_much_offered(nodes, size, Path::new("/tmp"), 1_000);
        assert_eq!(offered(2, 500), None);
        let told = offered(3, 500).expect("too much");
        assert!(
            told.contains("1.500 KB") && told.contains("--node-size"),
            "{told}"
        );
    }
}
