//! `bafs mount`, `bafs exec` and `bafs agent`: agents for a person and for a node. They run before
//! any thread exists, because a process that has threads may not enter a user name space.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bafs_client::agent::{Choices, Explain};
use bafs_client::tree::Promise;
use bafs_proto::message::{Advert, JobCommand, JobSpec, MountSpec, MountTarget, Role};
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeKind, VolumeStatus};

use crate::args::{AgentArgs, ClientArgs, DelegateArgs, ExecArgs, MountArgs};
use crate::client::Client;
use crate::init;

const SECOND_MS: u64 = 1000;

/// Runs `bafs exec`.
pub(crate) fn exec(args: &ExecArgs) -> Result<ExitCode> {
    let wanted = args
        .mounts
        .iter()
        .map(|text| parse_mount(text))
        .collect::<Result<Vec<_>>>()?;
    let mounts = find_apart(&args.client, &wanted)?;
    refuse_twice(&mounts)?;
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
        },
        mounts,
        op_deadline_ms: args.op_deadline.saturating_mul(SECOND_MS),
    };
    let identity = init::load(&args.client.identity, Role::Agent)?;
    Ok(bafs_client::entry::exec_main(
        spec,
        identity,
        choices(args.explain, args.delegate, Promise::Synced),
    ))
}

/// Runs `bafs mount`.
pub(crate) fn mount(args: &MountArgs) -> Result<ExitCode> {
    let wanted = Wanted {
        volume: args.volume.clone(),
        path: args.directory.to_string_lossy().into_owned(),
        access: match (args.read_only, args.write_back) {
            (true, _) => Access::ReadOnly,
            (false, false) => Access::ReadWrite,
            (false, true) => Access::WriteBack,
        },
    };
    let mounts = find_apart(&args.client, &[wanted])?;
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

/// Runs `bafs agent`.
pub(crate) fn agent(args: &AgentArgs) -> ExitCode {
    let choices = choices(false, args.delegate, Promise::Synced);
    bafs_client::entry::agent_main(&args.identity, choices)
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

/// A volume has one writer, and a place one volume.
fn refuse_twice(mounts: &[MountSpec]) -> Result<()> {
    for (at, one) in mounts.iter().enumerate() {
        for other in &mounts[..at] {
            let writes = one.writable || other.writable;
            if one.path == other.path {
                bail!("--mount: two volumes at {}; name two places", one.path);
            }
            let places = [Path::new(&one.path), Path::new(&other.path)];
            if places[0].starts_with(places[1]) || places[1].starts_with(places[0]) {
                let (one, other) = (&one.path, &other.path);
                bail!("--mount: of {one} and {other} one is inside the other; name places apart");
            }
            if one.target == other.target && writes {
                let name = &one.name;
                bail!("--mount: {name} twice, and one writes; mount it once, or both :ro");
            }
        }
    }
    Ok(())
}

fn parse_mount(text: &str) -> Result<Wanted> {
    let Some((volume, rest)) = text.split_once(":/").filter(|(name, _)| !name.is_empty()) else {
        bail!("--mount {text}: write VOLUME:/absolute/path or VOLUME:/absolute/path:ro");
    };
    let (path, access) = match rest.rsplit_once(':') {
        None => (rest, Access::ReadWrite),
        Some((path, "rw")) => (path, Access::ReadWrite),
        Some((path, "ro")) => (path, Access::ReadOnly),
        Some((path, "write-back")) => (path, Access::WriteBack),
        Some((_, other)) => bail!(
            "--mount {text}: '{other}' is neither 'ro' nor 'rw' nor 'write-back'; a path with a \
             colon needs one of them behind it"
        ),
    };
    Ok(Wanted {
        volume: volume.to_owned(),
        path: format!("/{path}"),
        access,
    })
}

/// Finds volumes through the catalog on a thread of its own whose runtime is gone on return, so
/// that this process has one thread again.
fn find_apart(args: &ClientArgs, wanted: &[Wanted]) -> Result<Vec<MountSpec>> {
    std::thread::scope(|scope| {
        let finding = scope.spawn(|| -> Result<Vec<MountSpec>> {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let found = runtime.block_on(find(args, wanted));
            runtime.shutdown_background();
            found
        });
        finding
            .join()
            .unwrap_or_else(|_| bail!("the search for volumes failed"))
    })
}

async fn find(args: &ClientArgs, wanted: &[Wanted]) -> Result<Vec<MountSpec>> {
    let client = Client::new(args)?;
    let mut mounts = Vec::with_capacity(wanted.len());
    for want in wanted {
        let (node, status) = client.volume(&want.volume).await?;
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
            bail!("volume {name} is a cache and cannot be written; mount it without write-back")
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
}
