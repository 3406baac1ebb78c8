//! Stories: a workflow and facts, and the actions that follow, as text files in `stories/`.
//! `BAFS_BLESS=1` writes down what follows now. Numbers are the run's own counter of ids.

use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Action, Event, NodeDeparture, NodeInfo, Scheduler, Settings, Space};
use bafs_workflow::parse_workflow;

/// A node of 100 MB: "2", or "2x3" when it has three slots. "2d" drains, "2@5000" leaves then.
fn parse_node(text: &str) -> NodeInfo {
    let (text, at) = text.split_once('@').map_or((text, None), |(node, at)| {
        (node, Some(Time(at.parse().expect("a time"))))
    });
    let departure = NodeDeparture {
        at,
        is_draining: text.ends_with('d'),
    };
    let text = text.trim_end_matches('d');
    let (id, slots) = text.split_once('x').unwrap_or((text, "1"));
    let id = id.parse().expect("a node is a number");
    let capacity = Space {
        bytes: 100_000_000,
        files: 100_000,
    };
    let slots = slots.parse().expect("slots are a number");
    NodeInfo {
        departure,
        ..NodeInfo::single_group(ServerId(id), capacity, slots)
    }
}

/// How a job ended, and what it did to a volume that had no space: its name, what it held, and what
/// the disk below had free if that is known.
fn parse_report(words: &[&str]) -> JobReport {
    let environment = |code, why| JobOutcome::EnvironmentFailed(Error::new(code, why));
    let outcome = match words[0] {
        "exited" => JobOutcome::Exited(words[2].parse().expect("a code")),
        "full" => JobOutcome::Exited(1),
        "missing" => JobOutcome::NotStarted("/bin/tool does not exist".to_owned()),
        "unreachable" => environment(ErrorCode::Unreachable, "no answer"),
        "interrupted" => environment(ErrorCode::NodeLeaving, "the node was asked to end"),
        "homeless" => environment(ErrorCode::HomeUnreachable, "home does not answer"),
        _ => environment(ErrorCode::Unsupported, "no /dev/fuse"),
    };
    let used = |held: &str| VolumeUse {
        name: words[2].to_owned(),
        used_bytes: held.parse().expect("bytes"),
        disk_free_bytes: words.get(4).map(|free| free.parse().expect("bytes")),
        no_space_errors: 1,
        ..VolumeUse::default()
    };
    let full = words.get(3).filter(|_| words[0] == "full");
    JobReport {
        outcome,
        wall_ms: 1,
        cpu_ms: 1,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes: full.into_iter().map(|held| used(held)).collect(),
    }
}

/// Who answers.
fn parse_connectivity_event(words: &[&str]) -> Event {
    match words[0] {
        "silent" => Event::ServerSilent {
            server: parse_node(words[1]).id,
        },
        "cutoff" => Event::CutOff {
            silent_ms: 8_000,
            has_catalog: words.get(1) == Some(&"catalog"),
        },
        "found" => Event::VolumesFound {
            server: parse_node(words[1]).id,
            found: words[2..]
                .iter()
                .map(|id| VolumeId(id.parse().expect("a number")))
                .collect(),
        },
        _ => Event::Reconnected,
    }
}

fn parse_event(words: &[&str]) -> Event {
    let number = |at: usize| words[at].parse::<u128>().expect("a number");
    let execution = || ExecutionId(number(1));
    match words[0] {
        "seen" => Event::nodes_listed(words[1..].iter().map(|word| parse_node(word)).collect()),
        "missed" => Event::NodesListed {
            nodes: Vec::new(),
            unlisted: words[1..].iter().map(|word| parse_node(word).id).collect(),
        },
        "silent" | "cutoff" | "reached" | "found" => parse_connectivity_event(words),
        "copied" => Event::VolumeCopied {
            volume: VolumeId(number(1)),
            received_bytes: 0,
        },
        "created" => Event::VolumeCreated {
            volume: VolumeId(number(1)),
        },
        "nospace" | "anew" | "broken" => Event::VolumeCreateFailed {
            volume: VolumeId(number(1)),
            error: match words[0] {
                "nospace" => Error::new(ErrorCode::NoSpaceBytes, "No space left on device"),
                "broken" => Error::new(ErrorCode::ServerFault, "Input/output error"),
                _ => Error::new(ErrorCode::StoreLost, "it was started anew"),
            },
        },
        "deleted" => Event::VolumeDeleted {
            volume: VolumeId(number(1)),
        },
        "started" => Event::JobStarted {
            execution: execution(),
        },
        "exited" | "full" | "interrupted" | "unsupported" | "unreachable" | "homeless"
        | "missing" => Event::JobEnded {
            execution: execution(),
            report: parse_report(words),
        },
        "refused" => Event::JobStartFailed {
            execution: execution(),
            error: Error::new(ErrorCode::NotFound, "no home has it"),
        },
        "unknown" => Event::JobUnknown {
            execution: execution(),
        },
        "extracted" => Event::FileExtracted {
            extract: ExtractionId(number(1)),
            bytes: 1,
        },
        "denied" | "misplaced" | "unsendable" | "gone" | "unwritten" | "unreachable_home"
        | "fenced" => Event::ExtractFailed {
            extract: ExtractionId(number(1)),
            error: match words[0] {
                "unreachable_home" => Error::new(ErrorCode::HomeUnreachable, "no answer"),
                "unwritten" => Error::new(ErrorCode::NotFound, "no file is at '*.b'"),
                "denied" => Error::new(ErrorCode::RightMissing, "no credentials here"),
                "misplaced" => Error::new(ErrorCode::Unsupported, "it is not below the export"),
                "fenced" => Error::new(ErrorCode::UploadFenced, "a later upload is there"),
                "unsendable" => Error::new(ErrorCode::BadPath, "it is a directory"),
                _ => Error::new(ErrorCode::VolumeLost, "it is not here"),
            },
        },
        "undeleted" => Event::VolumeDeleteFailed {
            volume: VolumeId(number(1)),
        },
        "resumed" => Event::SchedulerResumed { id_prefix: 0 },
        "cancelled" => Event::CancelRequested,
        "tick" => Event::Tick,
        other => panic!("no event is called {other}"),
    }
}

fn describe_action(scheduler: &Scheduler, action: &Action) -> String {
    let workflow = scheduler.workflow();
    match action {
        Action::CreateVolume {
            id,
            volume,
            server,
            size,
        } => {
            let name = &workflow.volume(*volume).name;
            format!(
                "create {} = {name} on n{} with {} bytes",
                id.0, server.0, size.bytes
            )
        }
        Action::CopyVolume {
            id, source, server, ..
        } => format!("copy {} to {} on n{}", source.id.0, id.0, server.0),
        Action::WarmCache { id, server } => format!("warm {} on n{}", id.0, server.0),
        Action::InspectCache { id, server } => format!("look at {} on n{}", id.0, server.0),
        Action::DeleteVolume { id, server } => format!("delete {} on n{}", id.0, server.0),
        Action::StartJob {
            execution,
            job,
            server,
            volumes,
            ..
        } => {
            let volumes: Vec<_> = volumes.iter().map(|volume| volume.id.0).collect();
            let name = &workflow.job(*job).name;
            format!(
                "start {} = {name} on n{} with {volumes:?}",
                execution.0, server.0
            )
        }
        Action::KillJob { execution, server } => format!("kill {} on n{}", execution.0, server.0),
        Action::ExtractFile {
            extract,
            index,
            source,
        } => {
            let target = &workflow.extracts[*index as usize].target;
            format!("extract {} from {} to {target}", extract.0, source.id.0)
        }
        Action::ProbeVolumes { server, .. } => format!("probe n{}", server.0),
        Action::FindVolumes { server, volumes } => {
            let volumes: Vec<_> = volumes.iter().map(|id| id.0).collect();
            format!("find {volumes:?} on n{}", server.0)
        }
        Action::Finish { outcome } => format!("finish {outcome:?}"),
    }
}

fn replay_story(text: &str) -> String {
    let (workflow, story) = text
        .split_once("----\n")
        .expect("a line ---- ends the workflow");
    let read = |path: &str| Err(path.to_owned());
    let checked = parse_workflow("w.bafs", workflow, &read).expect("the workflow is right");
    // The run 0 makes ids equal to their counter.
    let new = || Scheduler::new(RunId(0), checked.workflow.clone(), Settings::default());
    let (mut scheduler, mut restored) = (new(), new());
    scheduler.start_recording();
    let mut told = format!("{workflow}----\n");
    let mut warned = 0;
    for line in story.lines().filter(|line| line.starts_with('>')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let now = Time(words[1].parse().expect("a time"));
        let step = scheduler.record_step(now, parse_event(&words[2..]));
        scheduler.check();
        restored.redo(&step.changes);
        scheduler.check_restored(&restored);
        told += &format!("{line}\n");
        for action in step.actions {
            told += &format!("    {}\n", describe_action(&scheduler, &action));
        }
        for warning in &scheduler.warnings()[warned..] {
            told += &format!("    warn: {}\n", warning.text);
        }
        warned = scheduler.warnings().len();
    }
    told
}

#[test]
fn every_story_yields_the_recorded_actions() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stories");
    let mut stories = 0;
    for entry in std::fs::read_dir(directory).expect("stories") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a text");
        let told = replay_story(&text);
        if std::env::var_os("BAFS_BLESS").is_some() {
            std::fs::write(&path, &told).expect("write");
        }
        assert!(
            std::env::var_os("BAFS_BLESS").is_some() || told == text,
            "{path:?}:\n{told}"
        );
        stories += 1;
    }
    assert!(stories >= 2, "only {stories} stories were found");
}
