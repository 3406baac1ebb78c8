//! Whether the jobs of a run have what they need, before the first of them starts: what `bafs
//! check` finds wrong fails jobs one by one otherwise, hours later.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use bafs_sched::earlier_work::SourceState;
use bafs_workflow::{CheckedWorkflow, JobIndex, Url};

use crate::args::RunArgs;
use crate::finding::{Finding, FindingKind};
use crate::home_view::HomeView;
use crate::output::print_notice;
use crate::workflow_findings::{JobMachine, PlannedJobs, find_run_faults};

/// Refuses a run whose jobs lack what they need; `sources` is what homes have. A home that is away
/// stops no run, which waits for it.
///
/// # Errors
/// There are such jobs, unless the user wants the others to run, or only to know what would.
pub(super) fn check_faults(
    args: &RunArgs,
    checked: &CheckedWorkflow,
    homes: &HomeView,
    running: &BTreeSet<JobIndex>,
    sources: &BTreeMap<Url, SourceState>,
) -> Result<()> {
    let machine = match args.local {
        Some(_) => JobMachine::This,
        None => JobMachine::Nodes,
    };
    let planned = PlannedJobs { running, sources };
    let found = find_run_faults(checked, homes, machine, planned);
    let is_told = |finding: &&Finding| finding.kind != FindingKind::NotLookedAt;
    let (stopping, others): (Vec<&Finding>, Vec<&Finding>) = found
        .iter()
        .filter(is_told)
        .partition(|finding| stops_run(args, finding.kind));
    let goes_on = stopping.is_empty() || args.keep_going || args.dry_run;
    let told = others
        .into_iter()
        .chain(stopping.iter().copied().filter(|_| goes_on));
    told.for_each(|finding| print_notice(&finding.describe()));
    if goes_on {
        return Ok(());
    }
    // What stops a run is more than a warning, which it may be for `bafs check`.
    let as_error = |finding: &&Finding| Finding {
        is_error: true,
        ..(*finding).clone()
    };
    let described = stopping.iter().map(as_error);
    let described: Vec<String> = described.map(|finding| finding.describe()).collect();
    bail!(
        "nothing was run: jobs lack what they need\n{}\nto run all other jobs: --keep-going",
        described.join("\n")
    )
}

/// The nodes of a pool come later, with their programs.
fn stops_run(args: &RunArgs, kind: FindingKind) -> bool {
    let comes = args.pool.is_some() && kind == FindingKind::ProgramOnNoNode;
    kind.stops_run() && !comes
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_workflow::parse_workflow;
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    #[test]
    fn run_is_refused_where_jobs_lack_files() {
        let home = tempfile::tempdir().expect("a directory");
        let text = "for i in 1..2\nvolume v$(i) cache bafs://home/in$(i) 1 MB\n\
                    job a$(i) {\nexecutable = sh\n}\nmount v$(i) a$(i) /in\nend\n\
                    job b {\nexecutable = no-such-program-9\n}\njob c {\nexecutable = sh\n}\n";
        let none = |path: &str| Err(path.to_owned());
        let checked = parse_workflow("w.bafs", text, &none).expect("it is right");
        let check = |running: &[u32], options: &[&str]| {
            let words = [&["bafs", "run", "w.bafs", "--local", "1"], options].concat();
            let CliCommand::Run(args) = Cli::try_parse_from(words).expect("words").command else {
                panic!("it is another command");
            };
            let view = HomeView::Directory(home.path().to_owned());
            let running = running.iter().copied().map(JobIndex).collect();
            let ended = check_faults(&args, &checked, &view, &running, &BTreeMap::new());
            ended.map_err(|error| error.to_string())
        };
        let told = check(&[0, 1, 2, 3], &[]).expect_err("files are missing");
        let expected = "nothing was run: jobs lack what they need\n\
                        error: 2 sources of volumes are not at their home\n  \
                        bafs://home/in1 (volume v1)\n  bafs://home/in2 (volume v2)\n  \
                        to do: correct the URL, or put the files there\n\
                        error: 1 program does not exist\n  no-such-program-9 (job b)\n";
        assert!(told.starts_with(expected), "{told}");
        assert_eq!(check(&[0, 1, 2, 3], &["--keep-going"]), Ok(()));
        assert_eq!(check(&[3], &[]), Ok(()), "the others are up to date");
        fs::write(home.path().join("in1"), "x").expect("write");
        assert_eq!(check(&[0, 3], &[]), Ok(()));
        assert!(check(&[1], &[]).is_err());
    }
}
