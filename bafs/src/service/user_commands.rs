//! `bafs user`: who may use a service. The cluster's authority signs identities here; the service
//! never has its keys.

use anyhow::{Context, Result, bail};
use bafs_proto::identity::Authority;
use bafs_proto::message::Role;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right, Token};
use bafs_queue::UserQuota;
use bafs_queue::logic::records::UserRecord;
use bafs_server::clock;

use super::calls::{Changed, QueueRequest, UserAdded, UserList};
use super::client_commands::{ServiceClient, ServiceFile};
use crate::args::{ServiceArgs, UserAddArgs, UserCommand, UserRemoveArgs};
use crate::init::{self, DAY_MS};
use crate::output::Printer;
use crate::units::{format_bytes, parse_bytes};

/// Runs the command.
pub(super) async fn run_user_command(command: UserCommand, output: Printer) -> Result<()> {
    match command {
        UserCommand::Add(args) => add_user(args, output).await,
        UserCommand::List(args) => list_users(args, output).await,
        UserCommand::Remove(args) => remove_user(args, output).await,
    }
}

async fn add_user(args: UserAddArgs, output: Printer) -> Result<()> {
    if args.to.exists() {
        bail!(
            "--to {}: the directory exists already; name a new one",
            args.to.display()
        );
    }
    let authority = args.service.identity.join("authority");
    let authority = Authority::load(&authority).with_context(|| {
        format!(
            "--identity {}: only the authority of the cluster adds users",
            args.service.identity.display()
        )
    })?;
    let bytes = args
        .space
        .as_deref()
        .map(parse_bytes)
        .transpose()
        .context("--space")?;
    let slots = args.slots;
    let client = ServiceClient::connect(&args.service)?;
    let request = QueueRequest::AddUser {
        name: args.name.clone(),
        homes: args.homes.clone(),
        quota: UserQuota { slots, bytes },
    };
    let UserAdded {
        generation,
        catalog,
    } = client.ask(&request).await?;
    let expires = clock::now().plus_ms(args.days.saturating_mul(DAY_MS));
    let token = sign_token(&authority, &args, generation, expires)?;
    let identity = authority.issue(Role::Agent, token)?;
    identity.save(&init::identity_directory(&args.to, Role::Agent))?;
    let file = ServiceFile {
        user: args.name.clone(),
        service: client.address.clone(),
        catalog,
    };
    file.write(&args.to)?;
    output.print_result(
        &format!(
            "made {0}, with which {1} uses the service at {2} until {3}\nNext: give {0} to {1} \
             only, and there\n  bafs submit WORKFLOW --identity {0}",
            args.to.display(),
            args.name,
            client.address,
            expires.to_utc_text()
        ),
        &serde_json::json!({ "identity": args.to, "user": args.name, "expires": expires }),
    )
}

/// What a user may: own workflows, paths at home, and to see which servers there are.
fn sign_token(
    authority: &Authority,
    args: &UserAddArgs,
    generation: u64,
    expires: Time,
) -> Result<Token> {
    let own = [Resource::Queue(format!("{}/{generation}", args.name))];
    let homes: Vec<Resource> = match args.homes.as_slice() {
        [] => vec![Resource::Home(String::new())],
        homes => homes
            .iter()
            .map(|path| Resource::Home(path.trim_matches('/').to_owned()))
            .collect(),
    };
    let others = [Resource::Queue(String::new())];
    let work: &[Right] = &[Right::Read, Right::Write];
    let mut granted: Vec<(&[Resource], &[Right])> = vec![
        (&own, work),
        (&homes, work),
        (&[Resource::Catalog], &[Right::Read]),
    ];
    if args.list_others {
        granted.push((&others, &[Right::Read]));
    }
    Ok(authority.signer().grant_per_resource(&granted, expires)?)
}

async fn list_users(args: ServiceArgs, output: Printer) -> Result<()> {
    let client = ServiceClient::connect(&args)?;
    let UserList { users } = client.ask(&QueueRequest::ListUsers).await?;
    let lines: Vec<String> = users.iter().map(describe_user).collect();
    let text = match lines.is_empty() {
        true => "no users".to_owned(),
        false => lines.join("\n"),
    };
    let rows = users.iter().map(|(name, record)| {
        serde_json::json!({
            "name": name,
            "is_active": record.is_active,
            "homes": record.homes,
            "quota": record.quota,
            "usage": record.usage,
        })
    });
    output.print_result(&text, &rows.collect::<Vec<_>>())
}

fn describe_user((name, record): &(String, UserRecord)) -> String {
    let state = if record.is_active { "" } else { " (removed)" };
    let usage = record.usage;
    let mut text = format!(
        "{name}{state}: used {:.1} slot hours and sent {}",
        usage.slot_ms as f64 / 3_600_000.0,
        format_bytes(usage.home_bytes.into())
    );
    if let Some(slots) = record.quota.slots {
        text += &format!("; at most {slots} slots");
    }
    if let Some(bytes) = record.quota.bytes {
        text += &format!("; at most {}", format_bytes(bytes.into()));
    }
    text
}

async fn remove_user(args: UserRemoveArgs, output: Printer) -> Result<()> {
    let client = ServiceClient::connect(&args.service)?;
    let Changed {} = client
        .ask(&QueueRequest::RemoveUser(args.name.clone()))
        .await?;
    output.print_result(
        &format!(
            "the service refuses {name} from now on; workflows that {name} submitted still run: \
             'bafs queue' lists them, and 'bafs remove NUMBER' ends one",
            name = args.name
        ),
        &serde_json::json!({ "removed": args.name }),
    )
}
