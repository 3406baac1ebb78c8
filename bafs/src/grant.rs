//! `bafs grant`: an identity that can mount volumes, and see which servers there are, for a machine
//! that shall not hold the scheduler's. Asks no authority: whoever holds a token can narrow it.

use anyhow::{Context, Result, bail};
use bafs_proto::identity::Identity;
use bafs_proto::message::Role;
use bafs_proto::token::{Resource, Right};
use bafs_server::clock;

use crate::args::GrantArgs;
use crate::client::ClusterClient;
use crate::init::{self, DAY_MS};
use crate::output::Printer;

/// Runs the command.
pub(crate) async fn grant(args: GrantArgs, output: Printer) -> Result<()> {
    if args.to.exists() {
        bail!(
            "--to {}: the directory exists already; name a new one",
            args.to.display()
        );
    }
    let client = ClusterClient::new(&args.client)?;
    let mut volumes = Vec::with_capacity(args.volumes.len());
    for name in &args.volumes {
        let (_, status) = client.find_volume(name).await?;
        volumes.push(Resource::Volume(status.spec.id));
    }
    let rights: &[Right] = if args.read_only {
        &[Right::Read]
    } else {
        &[Right::Read, Right::Write]
    };
    // The catalog tells where volumes are; to write there is to pose as a server.
    let granted: [(&[Resource], &[Right]); 2] =
        [(&[Resource::Catalog], &[Right::Read]), (&volumes, rights)];
    let asked = clock::now().plus_ms(args.days.saturating_mul(DAY_MS));
    let verifier = &client.identity.verifier;
    let token = verifier
        .narrow_per_resource(&client.identity.token, &granted, asked)
        .context("cannot restrict the token")?;
    // A token is good no longer than the one that it was made of.
    let expires = verifier.expiry_of(&token)?.unwrap_or(asked);
    let shortened = match expires < asked {
        true => ", when the identity that it was made with expires",
        false => "",
    };
    let agent = init::load_identity(&args.client.identity, Role::Agent)?;
    let narrow = Identity { token, ..agent };
    narrow.save(&init::identity_directory(&args.to, Role::Agent))?;
    output.print_result(
        &format!(
            "made {0}, which can {1} {2} until {3}{7}\n\
             Next: copy {0} to the machine, and there\n  \
             bafs mount {4} DIRECTORY{5} --identity {0} --catalog {6}",
            args.to.display(),
            if args.read_only {
                "read"
            } else {
                "read and write"
            },
            args.volumes.join(", "),
            expires.to_utc_text(),
            args.volumes[0],
            if args.read_only { " --read-only" } else { "" },
            args.client.catalog,
            shortened,
        ),
        &serde_json::json!({ "identity": args.to, "expires": expires }),
    )
}
