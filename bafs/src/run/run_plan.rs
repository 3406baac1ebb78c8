//! What a run does: resume the last one, or begin another that does only what has changed since.
//! Which jobs run is decided in `bafs_sched::earlier_work`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};
use bafs_proto::ErrorCode;
use bafs_proto::ids::{RunId, ServerId, VolumeId};
use bafs_proto::message::{Advert, RenewVolumes, ServerKind};
use bafs_sched::driver::EarlierRun;
use bafs_sched::earlier_work::{
    AdoptedVolume, EarlierWork, HomeState, JobDecisions, JobRecord, KeptVolume, RunReason,
    SourceState, decide_jobs, find_changes, source_of, summarise,
};
use bafs_sched::io::listing_tracker::{CacheNames, ListingTracker};
use bafs_sched::report::RunReport;
use bafs_sched::{Event, NodeInfo, Outcome, Progress, Scheduler, Settings};
use bafs_workflow::{CheckedWorkflow, JobIndex, VolumeIndex, Workflow};
use serde_json::json;

use super::fault_check::check_faults;
use super::home_state::look_at_homes;
use super::target_check::check_targets;
use crate::args::{RunArgs, UsageError};
use crate::client::ClusterClient;
use crate::home_view::HomeView;
use crate::logs::sibling_path;
use crate::output::print_notice;

/// Names that a notice has at most.
const NAMES_SHOWN_MAX: usize = 5;

/// What a run does.
#[derive(Debug)]
pub(super) enum RunPlan {
    /// It goes on with the last one, which was interrupted.
    Resume(EarlierRun),
    /// The last one was interrupted, and is of no use, for this reason: it is cancelled first.
    CancelFirst(EarlierRun, String),
    /// Another run begins.
    Begin(Box<PlannedRun>),
}

/// A run that begins.
#[derive(Debug)]
pub(super) struct PlannedRun {
    pub(super) decisions: JobDecisions,
    /// Jobs that ran once and are no longer in the workflow.
    removed: Vec<String>,
    /// The run before.
    earlier: Option<RunId>,
    pub(super) work: EarlierWork,
}

/// Where a run looks.
#[derive(Clone, Copy)]
pub(super) struct RunPlace<'p> {
    pub(super) journal: &'p Path,
    pub(super) homes: &'p HomeView,
    /// Whether its cluster ends with it.
    pub(super) is_temporary: bool,
    /// Whether a run that was interrupted counts as over.
    pub(super) ignores_open_runs: bool,
}

/// Decides what a run does.
///
/// # Errors
/// The journal cannot be read, a home cannot be reached, the command names an unknown job, or jobs
/// lack what they need.
pub(super) fn plan_run(
    args: &RunArgs,
    checked: &CheckedWorkflow,
    place: RunPlace<'_>,
) -> Result<RunPlan> {
    let workflow = &checked.workflow;
    let forced = find_forced(args, workflow)?;
    let earlier = read_earlier(args, place.journal)?;
    let is_open = |run: &&EarlierRun| {
        let is_interrupted = !run.is_over && run.has_begun && !run.is_temporary;
        is_interrupted && !place.is_temporary && !place.ignores_open_runs
    };
    if let Some(open) = earlier.as_ref().filter(is_open) {
        let is_wanted = forced.is_empty() && *open.workflow == *workflow;
        let why_not = match is_wanted {
            true => find_other_cluster(open, place.homes),
            false => Some("is not what is wanted now".to_owned()),
        };
        return Ok(match why_not {
            None => RunPlan::Resume(open.clone()),
            Some(why) => RunPlan::CancelFirst(open.clone(), why),
        });
    }
    let none = BTreeMap::new();
    let records = earlier.as_ref().map_or(&none, |run| &run.records);
    let home = look_at_homes(place.homes, workflow, records)?;
    let no_failures = BTreeSet::new();
    let failed = earlier.as_ref().map_or(&no_failures, |run| &run.failed);
    let mut own = find_changes(workflow, records, failed, &home);
    for job in forced {
        own[job.as_usize()] = Some(RunReason::Forced);
    }
    let kept = match (&earlier, place.homes) {
        (Some(run), HomeView::Cluster(cluster)) if !run.kept.is_empty() && !place.is_temporary => {
            let (client, kept) = (cluster.client().clone(), run.kept.clone());
            cluster.run(find_kept(client, kept, args.dry_run))?
        }
        _ => FoundVolumes::default(),
    };
    let decisions = decide_jobs(workflow, records, own, &kept.volumes);
    let running = decisions.running().collect();
    check_faults(args, checked, place.homes, &running, &home.sources)?;
    check_targets(place.homes, workflow, &running)?;
    let names: BTreeSet<&str> = workflow.jobs.iter().map(|job| job.name.as_str()).collect();
    let removed = records.keys().filter(|name| !names.contains(name.as_str()));
    Ok(RunPlan::Begin(Box::new(PlannedRun {
        removed: removed.cloned().collect(),
        earlier: earlier.as_ref().map(|run| run.run),
        work: EarlierWork {
            is_temporary: place.is_temporary,
            ..collect_work(
                workflow,
                records,
                &home,
                &decisions,
                kept,
                links_sources(args),
            )
        },
        decisions,
    })))
}

/// Why an interrupted run cannot go on where it would now, if so.
fn find_other_cluster(open: &EarlierRun, homes: &HomeView) -> Option<String> {
    let HomeView::Cluster(cluster) = homes else {
        return None;
    };
    let listed = cluster.run(cluster.client().list_servers(Some(ServerKind::Home)));
    // A catalog that does not answer now is waited for by the run.
    find_other_home(open, &listed.ok()?)
}

/// Whether a home of an interrupted run is another server by now, and its own is away: then what it
/// did is elsewhere, on another cluster perhaps, and it would wait in vain.
fn find_other_home(open: &EarlierRun, adverts: &[Advert]) -> Option<String> {
    open.homes.iter().find_map(|(name, (server, address))| {
        let is_own_away = adverts.iter().all(|home| home.id != *server);
        let mut others = adverts.iter();
        let other = others.find(|home| home.name.eq_ignore_ascii_case(name))?;
        is_own_away.then(|| {
            format!(
                "had the home '{name}' at {address}, and here that is another one, at {}",
                other.address
            )
        })
    })
}

/// What the journal tells. One that this version does not read is put aside if the user wants
/// everything to run anew.
fn read_earlier(args: &RunArgs, journal: &Path) -> Result<Option<EarlierRun>> {
    let error = match EarlierRun::read(journal) {
        Ok(earlier) => return Ok(earlier),
        Err(error) => error,
    };
    let is_unreadable = matches!(
        error.code,
        ErrorCode::Malformed | ErrorCode::VersionMismatch
    );
    if !is_unreadable {
        return Err(error.into());
    }
    if !args.forced {
        bail!("{error}; to run all jobs with a new journal, give --forced");
    }
    if !args.dry_run {
        let aside = sibling_path(journal, "unread");
        std::fs::rename(journal, &aside)
            .with_context(|| format!("cannot put {} aside", journal.display()))?;
        print_notice(&format!(
            "{error}; it is {} now, and a new one begins",
            aside.display()
        ));
    }
    Ok(None)
}

/// Jobs that the command line makes run.
fn find_forced(args: &RunArgs, workflow: &Workflow) -> Result<Vec<JobIndex>> {
    let all = workflow.jobs.iter().zip(0u32..);
    if args.forced {
        return Ok(all.map(|(_, index)| JobIndex(index)).collect());
    }
    let find = |name: &String| {
        let found = all.clone().find(|(job, _)| job.name == *name);
        let unknown =
            || UsageError::from_reason(format!("--from: the workflow has no job '{name}'"));
        found.map(|(_, index)| JobIndex(index)).ok_or_else(unknown)
    };
    args.from.iter().map(find).collect()
}

/// Whether the run links sources of one file at home, which changes what can be compared of them.
fn links_sources(args: &RunArgs) -> bool {
    args.remote_io || args.cache_only
}

/// All that the scheduler is told.
fn collect_work(
    workflow: &Workflow,
    records: &BTreeMap<String, JobRecord>,
    home: &HomeState,
    decisions: &JobDecisions,
    kept: FoundVolumes,
    links_files: bool,
) -> EarlierWork {
    let volumes = workflow.volumes.iter().zip(0u32..);
    let sources = volumes.filter_map(|(volume, index)| {
        let state = home.sources.get(source_of(&volume.kind)?)?;
        let SourceState::Listed(listing) = state else {
            return None;
        };
        if links_files && listing.is_file() {
            return None;
        }
        Some((VolumeIndex(index), listing.digest()?))
    });
    let adopted: Vec<AdoptedVolume> = decisions
        .adopted
        .iter()
        .map(|(volume, position)| {
            let kept = &kept.volumes[*position];
            AdoptedVolume {
                id: kept.id,
                volume: *volume,
                server: kept.server,
                size: kept.size,
            }
        })
        .collect();
    let used: BTreeSet<VolumeId> = adopted.iter().map(|volume| volume.id).collect();
    let dropped = kept.volumes.iter().filter(|kept| !used.contains(&kept.id));
    EarlierWork {
        records: records.values().cloned().collect(),
        up_to_date: decisions.up_to_date().collect(),
        sources: sources.collect(),
        programs: home.programs.clone().into_iter().collect(),
        files: home.files.clone().into_iter().collect(),
        dropped: dropped.map(|kept| (kept.id, kept.server)).collect(),
        nodes: kept.nodes,
        adopted,
        is_temporary: false,
    }
}

/// Kept volumes that are there, and their nodes.
#[derive(Debug, Default)]
struct FoundVolumes {
    volumes: Vec<KeptVolume>,
    nodes: Vec<NodeInfo>,
}

/// Asks the nodes of kept volumes for them. From then on nobody else gets their space, unless they
/// still give way.
async fn find_kept(
    client: ClusterClient,
    kept: Vec<KeptVolume>,
    gives_way: bool,
) -> Result<FoundVolumes> {
    let adverts = client.list_servers(Some(ServerKind::Node)).await?;
    let mut found = FoundVolumes::default();
    let mut holders: Vec<Advert> = Vec::new();
    for advert in adverts {
        let here: Vec<KeptVolume> = kept
            .iter()
            .filter(|kept| kept.server == advert.id)
            .cloned()
            .collect();
        if here.is_empty() {
            continue;
        }
        let call = RenewVolumes {
            volumes: here.iter().map(|kept| kept.id).collect(),
            lifetime_ms: 0,
            gives_way,
        };
        // A node that does not answer has nothing for this run.
        let Ok(renewed) = client.call(&advert.address, call).await else {
            continue;
        };
        let is_there = |kept: &KeptVolume| !renewed.lost_volumes.contains(&kept.id);
        found.volumes.extend(here.into_iter().filter(is_there));
        holders.push(advert);
    }
    found.nodes = describe_nodes(holders);
    Ok(found)
}

/// Nodes as the scheduler knows them. What they kept for this run they listed as free.
fn describe_nodes(adverts: Vec<Advert>) -> Vec<NodeInfo> {
    let nobody = Workflow {
        name: String::new(),
        jobs: Vec::new(),
        volumes: Vec::new(),
        extracts: Vec::new(),
    };
    let unknown = Scheduler::new(RunId(0), nobody, Settings::default());
    let now = bafs_server::clock::now();
    let listed = ListingTracker::default().compare_listing(
        &unknown,
        (adverts, &CacheNames::new()),
        now,
        |_: ServerId| true,
    );
    match listed {
        Some(Event::NodesListed { nodes, .. }) => nodes,
        _ => Vec::new(),
    }
}

impl PlannedRun {
    /// Whether no job needs to run.
    pub(super) fn is_nothing(&self) -> bool {
        self.decisions.running().next().is_none()
    }

    /// Whether there was a run before.
    pub(super) fn has_earlier(&self) -> bool {
        self.earlier.is_some()
    }

    /// How many jobs run and why, and which are gone.
    pub(super) fn describe(&self) -> String {
        let mut text = summarise(&self.decisions.reasons);
        if !self.removed.is_empty() {
            let shown = self.removed.iter().take(NAMES_SHOWN_MAX);
            let shown = shown.map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = match self.removed.len().saturating_sub(NAMES_SHOWN_MAX) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            text +=
                &format!("\nno longer in the workflow: {shown}{more}; their results stay at home");
        }
        text
    }

    /// The same with a line for each job that runs.
    pub(super) fn describe_jobs(&self, workflow: &Workflow) -> String {
        let mut text = self.describe();
        for (name, reason) in self.running(workflow) {
            text += &format!("\n  {name}: {reason}");
        }
        text
    }

    /// The same for programs.
    pub(super) fn to_json(&self, workflow: &Workflow) -> serde_json::Value {
        let jobs = self.running(workflow).map(
            |(name, reason)| json!({"name": name, "reason": reason, "text": reason.to_string()}),
        );
        let up_to_date = self.decisions.up_to_date().count();
        json!({
            "workflow": workflow.name,
            "resumes": false,
            "jobs_total": workflow.jobs.len(),
            "up_to_date": up_to_date,
            "run": jobs.collect::<Vec<_>>(),
            "removed": self.removed,
        })
    }

    fn running<'p>(
        &'p self,
        workflow: &'p Workflow,
    ) -> impl Iterator<Item = (&'p str, &'p RunReason)> {
        let jobs = workflow.jobs.iter().zip(&self.decisions.reasons);
        jobs.filter_map(|(job, reason)| Some((job.name.as_str(), reason.as_ref()?)))
    }

    /// The report of a run that has nothing to do.
    pub(super) fn empty_report(&self, workflow: &Workflow) -> RunReport {
        let (jobs, extracts) = (workflow.jobs.len() as u64, workflow.extracts.len() as u64);
        RunReport {
            run: self.earlier.unwrap_or(RunId(0)),
            workflow: workflow.name.clone(),
            outcome: Outcome::Complete,
            wall_ms: 0,
            totals: Progress {
                jobs_total: jobs,
                jobs_done: jobs,
                extracts_total: extracts,
                extracts_done: extracts,
                ..Progress::default()
            },
            jobs: Vec::new(),
            warnings: Vec::new(),
            warnings_omitted: 0,
            unsent_results: Vec::new(),
        }
    }
}

/// What a dry run says of a run that resumes.
pub(super) fn describe_resumed(open: &EarlierRun) -> (String, serde_json::Value) {
    let (done, total) = (open.records.len(), open.workflow.jobs.len());
    let done = done.min(total);
    let text = format!("the interrupted run resumes: {done} of {total} jobs are done");
    let value = json!({
        "workflow": open.workflow.name,
        "resumes": true,
        "jobs_total": total,
        "up_to_date": done,
    });
    (text, value)
}

#[cfg(test)]
mod tests {
    use bafs_proto::attributes::Attributes;
    use bafs_proto::message::Lifetime;

    use super::*;

    fn home(id: u64, name: &str) -> Advert {
        Advert {
            id: ServerId(id),
            kind: ServerKind::Home,
            name: name.to_owned(),
            address: format!("h{id}:1"),
            group: String::new(),
            ttl_ms: 4_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            lifetime: Lifetime::default(),
            attributes: Attributes::default(),
        }
    }

    #[test]
    fn interrupted_run_knows_its_home_again() {
        let nobody = Workflow {
            name: String::new(),
            jobs: Vec::new(),
            volumes: Vec::new(),
            extracts: Vec::new(),
        };
        let open = EarlierRun {
            run: RunId(1),
            workflow: nobody.into(),
            is_over: false,
            has_begun: true,
            is_temporary: false,
            records: BTreeMap::new(),
            failed: BTreeSet::new(),
            kept: Vec::new(),
            keep_ms: 0,
            homes: BTreeMap::from([("home".to_owned(), (ServerId(1), "a:1".to_owned()))]),
        };
        let find = |adverts: &[Advert]| find_other_home(&open, adverts);
        let told = "had the home 'home' at a:1, and here that is another one, at h2:1";
        assert_eq!(
            find(&[home(2, "Home"), home(3, "x")]).as_deref(),
            Some(told)
        );
        assert_eq!(find(&[home(1, "home")]), None, "it is there");
        assert_eq!(find(&[home(1, "renamed"), home(2, "home")]), None);
        assert_eq!(
            find(&[home(2, "other")]),
            None,
            "it is away, and may come back"
        );
        assert_eq!(find(&[]), None);
    }
}
