//! `bafs init`: the authority of a cluster and one identity for each role.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bafs_proto::identity::{Authority, Identity};
use bafs_proto::message::Role;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right, Token};
use bafs_server::clock;

use crate::args::InitArgs;
use crate::output::Printer;

pub(crate) const DAY_MS: u64 = 24 * 3600 * 1000;

/// What a cluster's directory may hold.
const IDENTITY_DIRECTORIES: [&str; 4] = ["authority", "server", "scheduler", "agent"];

/// Runs the command.
pub(crate) fn init(args: &InitArgs, output: Printer) -> Result<()> {
    if let Some(there) = IDENTITY_DIRECTORIES
        .iter()
        .find(|part| args.directory.join(part).exists())
    {
        bail!(
            "{0} already holds '{there}' of a cluster, and a new cluster would overwrite it; name \
             another directory, or remove {0} if you no longer need that cluster",
            args.directory.display()
        );
    }
    create_identities(
        &args.directory,
        clock::now().plus_ms(args.days.saturating_mul(DAY_MS)),
    )?;
    output.print_result(
        &format!(
            "created the authority and the identities in {0}\nNext: copy only {0}/server and \
             {0}/agent to your nodes (keep 'scheduler' and 'authority' to yourself: they have all \
             rights), then start\n  bafs catalog --identity {0} --listen HOST:7000",
            args.directory.display()
        ),
        &serde_json::json!({ "identity": args.directory }),
    )
}

/// Creates authority and identities in `directory`; tokens are good until `expires`.
pub(crate) fn create_identities(directory: &Path, expires: Time) -> Result<()> {
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
            .save(&identity_directory(directory, role))?;
    }
    Ok(())
}

/// Where the identity of a role is in a cluster's directory.
pub(crate) fn identity_directory(cluster: &Path, role: Role) -> PathBuf {
    cluster.join(match role {
        Role::Server => "server",
        Role::Scheduler => "scheduler",
        Role::Agent => "agent",
    })
}

/// Loads the identity of a role from a cluster's directory.
pub(crate) fn load_identity(cluster: &Path, role: Role) -> Result<Identity> {
    Identity::load(&identity_directory(cluster, role), role)
        .with_context(|| format!("--identity {}", cluster.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node's machine has no authority, and must not lose what it has.
    #[test]
    fn init_preserves_a_directory_with_an_identity() {
        for part in IDENTITY_DIRECTORIES {
            let directory = tempfile::tempdir().expect("a directory");
            let kept = directory.path().join(part);
            std::fs::create_dir(&kept).expect("a directory");
            std::fs::write(kept.join("key.pem"), "mine").expect("a file");
            let args = InitArgs {
                directory: directory.path().to_owned(),
                days: 1,
            };
            let refused = init(&args, Printer::new(true)).expect_err("it holds an identity");
            assert!(refused.to_string().contains(part), "{refused}");
            let left: Vec<_> = std::fs::read_dir(directory.path())
                .expect("it is there")
                .collect();
            assert_eq!(left.len(), 1, "{left:?}");
            let key = std::fs::read_to_string(kept.join("key.pem"));
            assert_eq!(key.expect("it is there"), "mine");
        }
    }
}
