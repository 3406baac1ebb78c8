//! What was learned stays: run times, sizes, failures and link rates of runs that are over, for
//! plans of later ones. `bafs learned` lists and forgets it.

mod learned_store;
mod learned_values;

use std::path::{Path, PathBuf};

use anyhow::Result;
use bafs_proto::message::JobOutcome;
use bafs_sched::io::journal;
use bafs_sched::report::{JobSummary, RunReport};
use bafs_sim::past_runs;
use bafs_workflow::{Job, VolumeIndex, VolumeKind, Workflow};

pub(crate) use self::learned_store::LearnedStore;
use self::learned_store::{Kind, RecordChanges};
use self::learned_values::{
    LearnedLinks, LearnedNode, LearnedProgram, LearnedVolume, Samples, family_of,
};
use crate::args::{LearnedArgs, LearnedCommand};
use crate::live_environment::LinkRates;
use crate::output::{Printer, print_notice};
use crate::units::format_bytes;

/// What stands for no file at all.
const NO_FILE: &str = "none";

/// The name of a record and its content.
type Row = (String, Vec<u8>);

/// The store that the command line names, if any.
pub(crate) fn find_store(args: &LearnedArgs) -> Option<LearnedStore> {
    let path = match &args.learned {
        Some(path) if path == Path::new(NO_FILE) => return None,
        Some(path) => path.clone(),
        None => default_path()?,
    };
    Some(LearnedStore::new(path))
}

fn default_path() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = named("XDG_STATE_HOME").map(PathBuf::from);
    let home = || named("HOME").map(|home| Path::new(&home).join(".local/state"));
    Some(state.or_else(home)?.join("bafs/learned.redb"))
}

/// Learns from a run that is over. That it cannot is no failure of the run. `catalog` names the
/// cluster, whose links are learned if it stays.
pub(crate) fn learn_from_run(
    args: &LearnedArgs,
    catalog: Option<&str>,
    journal: &Path,
    report: &RunReport,
) {
    let Some(store) = find_store(args) else {
        return;
    };
    let learn = || {
        let workflow = journal::read_header(journal)?.workflow;
        let rates = catalog.map(|_| measure_links(journal)).unwrap_or_default();
        store.add_run(&workflow, report, catalog.map(|catalog| (catalog, rates)))
    };
    if let Err(error) = tokio::task::block_in_place(learn) {
        print_notice(&format!("nothing is learned from this run: {error:#}"));
    }
}

/// Rates of links that the journal of a complete run shows.
fn measure_links(journal: &Path) -> LinkRates {
    let history = journal::read_history(journal).ok();
    let past = history.and_then(|history| past_runs::from_journal(history).ok());
    let site = past.and_then(|past| past.site);
    site.map_or_else(LinkRates::default, |site| LinkRates {
        home: site.home_bytes_per_s,
        local: site.local_bytes_per_s,
    })
}

impl LearnedStore {
    fn add_run(
        &self,
        workflow: &Workflow,
        report: &RunReport,
        links: Option<(&str, LinkRates)>,
    ) -> Result<()> {
        self.update(|read| {
            let mut changes = RecordChanges::default();
            for summary in &report.jobs {
                let Some(job) = workflow.jobs.get(summary.job.as_usize()) else {
                    continue;
                };
                let key = Kind::Program.key(&program_name(job));
                changes.change(&key, read, |it| add_execution(it, summary))?;
                let key = Kind::Node.key(&summary.node);
                let is_failed = summary.outcome != JobOutcome::Exited(0);
                changes.change(&key, read, |node: &mut LearnedNode| {
                    node.executions += 1;
                    node.failures += u64::from(is_failed);
                })?;
                for (mount, used) in job.mounts.iter().zip(&summary.volumes) {
                    let key = Kind::Volume.key(&data_name(workflow, mount.volume));
                    let read_bytes = used.pages.iter().flat_map(|file| &file.page_runs);
                    let read_bytes: u64 = read_bytes.map(|(_, pages)| pages * 4_096).sum();
                    let bytes = used.used_bytes.max(read_bytes);
                    if bytes == 0 {
                        continue;
                    }
                    changes.change(&key, read, |volume: &mut LearnedVolume| {
                        volume.used_bytes.add(bytes);
                        volume
                            .used_files
                            .add(used.used_files.max(used.pages.len() as u64));
                    })?;
                }
            }
            if let Some((catalog, rates)) = links {
                changes.change(
                    &Kind::Links.key(catalog),
                    read,
                    |links: &mut LearnedLinks| {
                        rates
                            .home
                            .into_iter()
                            .for_each(|rate| links.home_bytes_per_s.add(rate));
                        rates
                            .local
                            .into_iter()
                            .for_each(|rate| links.local_bytes_per_s.add(rate));
                    },
                )?;
            }
            Ok(changes)
        })
    }

    /// The rates that a plan may count on for the cluster with a catalog.
    pub(crate) fn link_rates(&self, catalog: &str) -> LinkRates {
        let links: Option<LearnedLinks> = self.find(&Kind::Links.key(catalog));
        let links = links.unwrap_or_default();
        let home = links.home_bytes_per_s.lower_bound();
        LinkRates {
            home,
            // What came from home came over links of nodes, too: no node's is known to be slower.
            local: links.local_bytes_per_s.lower_bound().max(home),
        }
    }

    /// The rate of the link to home that a plan may count on.
    pub(crate) fn home_rate(&self, catalog: &str) -> Option<u64> {
        self.link_rates(catalog).home
    }

    /// Gives volumes of unknown size the largest size that was seen.
    pub(crate) fn fill_unknown(&self, workflow: &mut Workflow) {
        if workflow.volumes.iter().all(|volume| volume.size_bytes > 0) {
            return;
        }
        let Ok(rows) = self.read_rows(|name| name.starts_with(Kind::Volume.prefix())) else {
            return;
        };
        for index in 0..workflow.volumes.len() {
            let name = data_name(workflow, VolumeIndex(index as u32));
            let volume = &mut workflow.volumes[index];
            if volume.size_bytes == 0 {
                let known: Option<LearnedVolume> = find_row(&rows, &Kind::Volume.key(&name));
                let bytes = known.and_then(|known| known.used_bytes.upper_bound());
                volume.size_bytes = bytes.unwrap_or(0);
            }
        }
    }

    /// Gives jobs the longest run times that were seen, and volumes of unknown size the largest
    /// sizes. Whether every job has one now.
    pub(crate) fn fill_for_plan(&self, workflow: &mut Workflow) -> bool {
        self.fill_unknown(workflow);
        let Ok(rows) = self.read_rows(|name| name.starts_with(Kind::Program.prefix())) else {
            return false;
        };
        let mut is_complete = !workflow.jobs.is_empty();
        for job in &mut workflow.jobs {
            let known: Option<LearnedProgram> =
                find_row(&rows, &Kind::Program.key(&program_name(job)));
            match known.and_then(|known| known.compute_ms.upper_bound()) {
                Some(ms) => job.runtime_s = Some(ms.div_ceil(1000).max(1)),
                None => is_complete = false,
            }
        }
        is_complete
    }

    fn find<T: serde::de::DeserializeOwned>(&self, name: &str) -> Option<T> {
        let rows = self.read_rows(|row| row == name).ok()?;
        find_row(&rows, name)
    }
}

fn find_row<T: serde::de::DeserializeOwned>(rows: &[Row], name: &str) -> Option<T> {
    let at = rows
        .binary_search_by(|(row, _)| row.as_str().cmp(name))
        .ok()?;
    serde_json::from_slice(&rows[at].1).ok()
}

/// A program is what is run by jobs that are named alike: many are scripts of one shell.
fn program_name(job: &Job) -> String {
    format!("{} {}", job.command.executable, family_of(&job.name))
}

/// A cache is known by its source, a scratch volume by its place in the workflow.
fn data_name(workflow: &Workflow, volume: VolumeIndex) -> String {
    let volume = workflow.volume(volume);
    match &volume.kind {
        VolumeKind::Cache { source, .. } => source.to_string(),
        VolumeKind::Scratch { .. } => format!("{}/{}", workflow.name, family_of(&volume.name)),
    }
}

fn add_execution(program: &mut LearnedProgram, summary: &JobSummary) {
    let failed = u64::from(summary.outcome != JobOutcome::Exited(0));
    program.executions += u64::from(summary.attempts.max(1));
    // All but the last one failed, or the job would not have run again.
    program.failures += u64::from(summary.attempts.saturating_sub(1)) + failed;
    if failed > 0 {
        return;
    }
    program.compute_ms.add(summary.computed_ms);
    program.wall_ms.add(summary.wall_ms);
    let sum = |of: fn(&bafs_proto::job_report::VolumeUse) -> u64| {
        summary.volumes.iter().map(of).sum::<u64>()
    };
    program.read_bytes.add(sum(|used| used.read_bytes));
    program.written_bytes.add(sum(|used| used.written_bytes));
}

/// Runs `bafs learned`.
pub(crate) fn run_learned_command(command: &LearnedCommand, output: Printer) -> Result<()> {
    match command {
        LearnedCommand::List(args) => {
            let rows = match find_store(&args.place) {
                Some(store) => store.read_rows(|name| has_part(name, args.part.as_deref()))?,
                None => Vec::new(),
            };
            let lines: Vec<String> = rows.iter().filter_map(describe_row).collect();
            let text = match lines.is_empty() {
                true => "nothing is learned yet".to_owned(),
                false => lines.join("\n"),
            };
            let rows = rows.iter().map(|(name, value)| {
                let value: serde_json::Value = serde_json::from_slice(value).unwrap_or_default();
                serde_json::json!({ "name": name, "learned": value })
            });
            output.print_result(&text, &rows.collect::<Vec<_>>())
        }
        LearnedCommand::Forget(args) => {
            let Some(store) = find_store(&args.place) else {
                return output.print_result("nothing", &serde_json::json!({ "forgotten": 0 }));
            };
            if args.all {
                store.remove_all()?;
                return output
                    .print_result("forgot all", &serde_json::json!({ "forgotten": "all" }));
            }
            let count = store.remove_rows(|name| has_part(name, args.part.as_deref()))?;
            output.print_result(
                &format!("forgot {count} records"),
                &serde_json::json!({ "forgotten": count }),
            )
        }
    }
}

fn has_part(name: &str, part: Option<&str>) -> bool {
    part.is_none_or(|part| name.contains(part))
}

fn describe_row((name, value): &Row) -> Option<String> {
    let kind = Kind::ALL
        .into_iter()
        .find(|kind| name.starts_with(kind.prefix()))?;
    let seconds = |samples: &Samples| match samples.interval() {
        Some((low, high)) => format!("{:.1} to {:.1} s", low as f64 / 1e3, high as f64 / 1e3),
        None => "unknown".to_owned(),
    };
    let bytes = |samples: &Samples| match samples.interval() {
        Some((low, high)) => format!(
            "{} to {}",
            format_bytes(low.into()),
            format_bytes(high.into())
        ),
        None => "unknown".to_owned(),
    };
    Some(match kind {
        Kind::Program => {
            let it: LearnedProgram = serde_json::from_slice(value).ok()?;
            format!(
                "{name}: computes {}, reads {}, writes {}; {} of {} executions failed",
                seconds(&it.compute_ms),
                bytes(&it.read_bytes),
                bytes(&it.written_bytes),
                it.failures,
                it.executions
            )
        }
        Kind::Volume => {
            let it: LearnedVolume = serde_json::from_slice(value).ok()?;
            format!("{name}: holds {}", bytes(&it.used_bytes))
        }
        Kind::Node => {
            let it: LearnedNode = serde_json::from_slice(value).ok()?;
            format!("{name}: {} of {} jobs failed", it.failures, it.executions)
        }
        Kind::Links => {
            let it: LearnedLinks = serde_json::from_slice(value).ok()?;
            format!(
                "{name}: home {} per second, nodes {} per second",
                bytes(&it.home_bytes_per_s),
                bytes(&it.local_bytes_per_s)
            )
        }
    })
}
