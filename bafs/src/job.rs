//! `bafs mount`, `bafs exec` and `bafs agent`: agents for a person and for a node. They run before
//! any thread exists, because a process that has threads may not enter a user name space.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use bafs_client::agent::{Choices, Explain, TemporaryPlace};
use bafs_client::entry::EXIT_ENVIRONMENT;
use bafs_client::sandbox::{self, JobPlan, Remover, Session, VolumeBind};
use bafs_client::tree::Promise;
use bafs_proto::ErrorCode;
use bafs_proto::identity::Identity;
use bafs_proto::message::{Advert, JobCommand, JobSpec, MountSpec, MountTarget, Role};
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeKind, VolumeStatus};
use bafs_server::executor::machine_memory_bytes;
use serde_json::json;

use crate::args::{AgentArgs, ClientArgs, DelegateArgs, ExecArgs, MountArgs, WrongUse};
use crate::client::Client;
use crate::init;
use crate::own_directory::OwnDirectory;
use crate::rate::parse_bytes;

const SECOND_MS: u64 = 1000;

/// Why a program of `bafs exec` was not begun.
#[derive(Debug)]
struct NotBegun {
    /// The volume that is the cause, if one is.
    volume: Option<String>,
    error: anyhow::Error,
}

impl From<anyhow::Error> for NotBegun {
    fn from(error: anyhow::Error) -> Self {
        Self {
            volume: None,
            error,
        }
    }
}

/// Runs `bafs exec`.
pub(crate) fn exec(args: &ExecArgs) -> Result<ExitCode> {
    let wanted = args
        .mounts
        .iter()
        .map(|text| parse_mount(text))
        .collect::<Result<Vec<_>>>()?;
    refuse_places(&wanted)?;
    let prepared = prepare(args, &wanted).and_then(|(spec, identity)| {
        let directory = OwnDirectory::create("exec", false)?;
        // Also where this process is killed.
        let remover = Remover::start(directory.path()).context("cannot start a process")?;
        Ok((spec, identity, (directory, remover)))
    });
    match prepared {
        Ok((spec, identity, (directory, remover))) => {
            let choices = choices(args.explain, args.delegate, Promise::Synced);
            let place = TemporaryPlace {
                directory: directory.path().to_owned(),
                memory_bytes: machine_memory_bytes() / 2,
            };
            let code = bafs_client::entry::exec_main(spec, identity, choices, Some(place));
            drop(directory);
            drop(remover);
            Ok(code)
        }
        Err(NotBegun { error, .. }) if WrongUse::is_why(&error) => Err(error),
        // 1 would be the program's own.
        Err(not_begun) => Ok(environment_failed(&not_begun)),
    }
}

fn prepare(args: &ExecArgs, wanted: &[Wanted]) -> Result<(JobSpec, Identity), NotBegun> {
    let mounts = find_apart(&args.client, wanted)?;
    refuse_writers(&mounts)?;
    let (executable, arguments) = args.program.split_first().context("a program is needed")?;
    let directory = std::env::current_dir().context("the working directory is gone")?;
    let spec = JobSpec {
        name: executable.clone(),
        command: JobCommand {
            executable: executable.clone(),
            arguments: arguments.to_vec(),
            environment: BTreeMap::new(),
            directory: directory.to_string_lossy().into_owned(),
            stdout: None,
            stderr: None,
            share: args.share.clone(),
        },
        mounts,
        op_deadline_ms: args.op_deadline.saturating_mul(SECOND_MS),
    };
    Ok((spec, init::load(&args.client.identity, Role::Agent)?))
}

/// Says, as for what fails later, why a program was not begun.
fn environment_failed(not_begun: &NotBegun) -> ExitCode {
    let NotBegun { volume, error } = not_begun;
    let known = error.downcast_ref::<bafs_proto::Error>();
    // What no server said is what is not to be found.
    let code = known.map_or(ErrorCode::NotFound, |error| error.code);
    let line = json!({
        "reason": format!("{code:?}"),
        "code": code as u16,
        "volume": volume,
        "detail": format!("{error:#}"),
    });
    let _ = writeln!(io::stderr(), "{line}");
    ExitCode::from(EXIT_ENVIRONMENT)
}

/// Runs `bafs mount`.
pub(crate) fn mount(args: &MountArgs) -> Result<ExitCode> {
    refuse_no_directory(&args.directory)?;
    let wanted = Wanted {
        volume: args.volume.clone(),
        path: args.directory.to_string_lossy().into_owned(),
        access: match (args.read_only, args.write_back) {
            (true, _) => Access::ReadOnly,
            (false, false) => Access::ReadWrite,
            (false, true) => Access::WriteBack,
        },
    };
    let found = find_apart(&args.client, &[wanted]);
    let mounts = found.map_err(|not_begun| not_begun.error)?;
    let mount = mounts
        .into_iter()
        .next()
        .context("one volume was asked for")?;
    let identity = init::load(&args.client.identity, Role::Agent)?;
    let op_deadline_ms = args.op_deadline.saturating_mul(SECOND_MS);
    Ok(bafs_client::entry::mount_main(
        mount,
        &args.directory,
        identity,
        op_deadline_ms,
        // Programs on the host outlive the agent, and do not run again.
        choices(args.explain, args.delegate, Promise::Closed),
    ))
}

/// What a killed mount left on a directory fails in other ways, and is taken away before the new
/// one comes.
fn refuse_no_directory(directory: &Path) -> Result<()> {
    let refused = |why: &str| {
        let shown = directory.display();
        Err(WrongUse::because(format!("{shown} {why}")))
    };
    match std::fs::metadata(directory) {
        Ok(found) if !found.is_dir() => refused("is no directory: a volume is shown in one"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            refused("is not there: make the directory first, with mkdir")
        }
        _ => Ok(()),
    }
}

/// Runs `bafs agent`.
pub(crate) fn agent(args: &AgentArgs) -> ExitCode {
    let choices = choices(false, args.delegate, Promise::Synced);
    let memory = args.shared_memory.as_deref().map(parse_bytes);
    let memory_bytes = match memory.transpose().context("--shared-memory") {
        Ok(bytes) => bytes.unwrap_or(0),
        Err(error) => {
            let _ = writeln!(io::stderr(), "bafs: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let temporary = args.temporary.clone().map(|directory| TemporaryPlace {
        directory,
        machine_memory_bytes,
    });
    bafs_client::entry::agent_main(&args.identity, args.printed.as_deref(), choices, temporary)
}

fn choices(explain: bool, DelegateArgs { delegate }: DelegateArgs, promise: Promise) -> Choices {
    let explain = if explain { Explain::Yes } else { Explain::No };
    let delegate = delegate.then_some(promise);
    Choices { explain, delegate }
}

/// A volume as the command line names it.
#[derive(Debug, Clone)]
struct Wanted {
    volume: String,
    path: String,
    access: Access,
}

/// How a volume is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    ReadOnly,
    ReadWrite,
    /// To write to, and the kernel may collect the writes.
    WriteBack,
}

/// Refuses places where no machine shows a volume, and those of several.
fn refuse_places(wanted: &[Wanted]) -> Result<()> {
    for (at, one) in wanted.iter().enumerate() {
        for other in &wanted[..at] {
            let (one, other) = (&one.path, &other.path);
            if one == other {
                return wrong(format!("two volumes at {one}; name two places"));
            }
            let places = [Path::new(one), Path::new(other)];
            if places[0].starts_with(places[1]) || places[1].starts_with(places[0]) {
                return wrong(format!(
                    "of {one} and {other} one is inside the other; name places apart"
                ));
            }
        }
    }
    let volumes = wanted.iter().map(|want| VolumeBind {
        name: want.volume.clone(),
        source: PathBuf::new(),
        path: want.path.clone().into(),
        access: sandbox::Access::ReadOnly,
    });
    let plan = JobPlan {
        job: String::new(),
        volumes: volumes.collect(),
        program: "any".into(),
        arguments: Vec::new(),
        environment: Vec::new(),
        directory: PathBuf::new(),
        identity: sandbox::Identity::Caller,
        session: Session::Own,
        temporary: None,
    };
    plan.check().or_else(|error| wrong(error.to_string()))
}

/// A volume has one writer.
fn refuse_writers(mounts: &[MountSpec]) -> Result<()> {
    for (at, one) in mounts.iter().enumerate() {
        let again = |other: &&MountSpec| other.target == one.target;
        let writes = |other: &MountSpec| one.writable || other.writable;
        if mounts[..at].iter().find(again).is_some_and(writes) {
            let name = &one.name;
            return wrong(format!(
                "{name} twice, and one writes; mount it once, or both :ro"
            ));
        }
    }
    Ok(())
}

fn wrong(why: String) -> Result<()> {
    Err(WrongUse::because(format!("--mount: {why}")))
}

fn parse_mount(text: &str) -> Result<Wanted> {
    let Some((volume, rest)) = text.split_once(":/").filter(|(name, _)| !name.is_empty()) else {
        return Err(WrongUse::because(format!(
            "--mount {text}: write VOLUME:/absolute/path or VOLUME:/absolute/path:ro"
        )));
    };
    let (path, access) = match rest.rsplit_once(':') {
        None => (rest, Access::ReadWrite),
        Some((path, "rw")) => (path, Access::ReadWrite),
        Some((path, "ro")) => (path, Access::ReadOnly),
        Some((path, "write-back")) => (path, Access::WriteBack),
        Some((_, other)) => {
            return Err(WrongUse::because(format!(
                "--mount {text}: '{other}' is neither 'ro' nor 'rw' nor 'write-back'; a path with \
                 a colon needs one of them behind it"
            )));
        }
    };
    Ok(Wanted {
        volume: volume.to_owned(),
        path: format!("/{path}"),
        access,
    })
}

/// Finds volumes through the catalog on a thread of its own whose runtime is gone on return, so
/// that this process has one thread again.
fn find_apart(args: &ClientArgs, wanted: &[Wanted]) -> Result<Vec<MountSpec>, NotBegun> {
    std::thread::scope(|scope| {
        let finding = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot look for volumes")?;
            let found = runtime.block_on(find(args, wanted));
            runtime.shutdown_background();
            found
        });
        finding
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the search for volumes failed").into()))
    })
}

async fn find(args: &ClientArgs, wanted: &[Wanted]) -> Result<Vec<MountSpec>, NotBegun> {
    let client = Client::new(args)?;
    let mut mounts = Vec::with_capacity(wanted.len());
    for want in wanted {
        let found = client.volume(&want.volume).await;
        let (node, status) = found.map_err(|error| NotBegun {
            volume: Some(want.volume.clone()),
            error,
        })?;
        mounts.push(mount_spec(&client, &node, &status, want)?);
    }
    Ok(mounts)
}

fn mount_spec(
    client: &Client,
    node: &Advert,
    status: &VolumeStatus,
    want: &Wanted,
) -> Result<MountSpec> {
    let (server, volume) = (node.address.clone(), status.spec.id);
    let (target, writable) = match status.spec.kind {
        VolumeKind::Scratch { .. } => {
            let writable = want.access != Access::ReadOnly;
            (MountTarget::Scratch { server, volume }, writable)
        }
        VolumeKind::Cache { .. } if want.access == Access::WriteBack => {
            let name = &status.spec.name;
            return Err(WrongUse::because(format!(
                "volume {name} is a cache and cannot be written; mount it without write-back"
            )));
        }
        VolumeKind::Cache { .. } => (MountTarget::Cache { server, volume }, false),
    };
    let rights: &[Right] = if writable {
        &[Right::Read, Right::Write]
    } else {
        &[Right::Read]
    };
    Ok(MountSpec {
        name: status.spec.name.clone(),
        path: want.path.clone(),
        target,
        writable,
        write_back: want.access == Access::WriteBack,
        token: client.give(Resource::Volume(volume), rights)?,
        keep_ms: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_path_of_a_mount_is_how_it_is_mounted() {
        let mount = |text: &str| parse_mount(text).map(|it| (it.volume, it.path, it.access));
        let v = |path: &str, access| ("v".to_owned(), path.to_owned(), access);
        assert_eq!(mount("v:/a").unwrap(), v("/a", Access::ReadWrite));
        assert_eq!(mount("v:/a/b:rw").unwrap(), v("/a/b", Access::ReadWrite));
        assert_eq!(mount("v:/a:ro").unwrap(), v("/a", Access::ReadOnly));
        assert_eq!(mount("v:/a:b:ro").unwrap(), v("/a:b", Access::ReadOnly));
        let back = v("/a", Access::WriteBack);
        assert_eq!(mount("v:/a:write-back").unwrap(), back);
        for wrong in ["v", ":/a", "v:a", "v:/a:RO", "v:/a:xx", "v:/a:"] {
            assert!(mount(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn places_of_volumes_are_refused_before_anything_is_looked_for() {
        let refusal = |mounts: &[&str]| {
            let wanted = mounts.iter().map(|text| parse_mount(text).unwrap());
            refuse_places(&wanted.collect::<Vec<_>>()).err()
        };
        assert!(refusal(&["v:/a", "w:/b"]).is_none());
        for wrong in [
            &["v:/proc"][..],
            &["v:/"],
            &["v:/a/../b"],
            &["v:/a", "w:/a"],
            &["v:/a", "w:/a/b"],
            &["v:/a/b", "w:/a"],
        ] {
            let refused = refusal(wrong).expect("no machine can do it");
            assert!(WrongUse::is_why(&refused), "{refused}");
        }
        assert!(WrongUse::is_why(&parse_mount("work").unwrap_err()));
    }

    #[test]
    fn a_volume_is_shown_in_a_directory_that_is_there() {
        let directory = tempfile::tempdir().unwrap();
        assert!(refuse_no_directory(directory.path()).is_ok());
        let path = directory.path().join("it");
        let refused = refuse_no_directory(&path).unwrap_err();
        assert!(WrongUse::is_why(&refused) && refused.to_string().contains("mkdir"));
        std::fs::write(&path, "a file").unwrap();
        let refused = refuse_no_directory(&path).unwrap_err();
        assert!(WrongUse::is_why(&refused), "{refused}");
    }
}
