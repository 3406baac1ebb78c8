//! `bafs init`: the authority of a cluster and one identity for each role.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bafs_proto::identity::{Authority, Identity};
use bafs_proto::message::Role;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right, Token};

use crate::args::InitArgs;
use crate::clock;
use crate::output::Output;

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Runs the command.
pub(crate) fn init(args: &InitArgs, output: Output) -> Result<()> {
    if args.directory.join("authority").exists() {
        bail!(
            "{} holds an authority already; a new one would cut off every part of its cluster. \
             Choose another directory",
            args.directory.display()
        );
    }
    create(
        &args.directory,
        clock::now().plus_ms(args.days.saturating_mul(DAY_MS)),
    )?;
    output.say(
        &format!(
            "created the authority and the identities in {0}\n\
             Next: copy {0} without 'authority' to your machines, then start\n  \
             bafs catalog --identity {0} --listen HOST:7000",
            args.directory.display()
        ),
        &serde_json::json!({ "identity": args.directory }),
    )
}

/// Creates authority and identities in `directory`; tokens are good until `expires`.
pub(crate) fn create(directory: &Path, expires: Time) -> Result<()> {
    let authority = Authority::generate()?;
    authority.save(&directory.join("authority"))?;
    let signer = authority.signer();
    let server = signer.grant(
        &[Resource::Catalog, Resource::Cooperative(String::new())],
        &[Right::Read, Right::Write],
        expires,
    )?;
    let all = [Right::Read, Right::Write, Right::Manage];
    let scheduler = signer.grant(&[Resource::Cluster], &all, expires)?;
    for (role, token) in [
        (Role::Server, server),
        (Role::Scheduler, scheduler),
        (Role::Agent, Token::none()),
    ] {
        authority
            .issue(role, token)?
            .save(&directory_of(directory, role))?;
    }
    Ok(())
}

/// Where the identity of a role is in a cluster's directory.
pub(crate) fn directory_of(cluster: &Path, role: Role) -> PathBuf {
    cluster.join(match role {
        Role::Server => "server",
        Role::Scheduler => "scheduler",
        Role::Agent => "agent",
    })
}

/// Loads the identity of a role from a cluster's directory.
pub(crate) fn load(cluster: &Path, role: Role) -> Result<Identity> {
    Identity::load(&directory_of(cluster, role), role)
        .with_context(|| format!("--identity {}", cluster.display()))
}
