//! `transfer`: a claim goes to another namespace, with its PersistentVolume and so with its data.
//!
//! A claim cannot change its namespace, so it is deleted and created again, while its PersistentVolume
//! is Retain and records what is to be done ([`step`] has the order). A command that was interrupted
//! anywhere is repeated.

pub mod execute;
pub mod step;
pub mod undo;

use std::fmt::Write as _;

use kube::api::ListParams;

use crate::change::{CHANGED, Need, Progress, confirm, mark, print_lines, require, until_end};
use crate::cli::{Change, TransferArguments, Wait};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result, TIMED_OUT};

use execute::{TRANSFERRED_FROM, Transfer, record_of};
use step::{NamespacedName, Next, Step, next};

/// Which way a claim goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the other namespace.
    Forward,
    /// Back to where it was, before the end of the transfer.
    Undo,
}

/// Moves the claim.
pub async fn run(cluster: &Cluster, arguments: &TransferArguments) -> Result<()> {
    let from = NamespacedName {
        namespace: cluster.namespace.clone(),
        name: arguments.claim.clone(),
    };
    let Some(namespace) = arguments.to_namespace.clone().filter(|_| !arguments.undo) else {
        return run_undo(cluster, arguments, from).await;
    };
    let to = NamespacedName {
        namespace,
        name: arguments.name.as_ref().unwrap_or(&arguments.claim).clone(),
    };
    let Some(transfer) = find_transfer(cluster, from, to).await? else {
        return Ok(());
    };
    let (from, to) = (&transfer.from, &transfer.to);
    let view = transfer.read().await?.view;
    if let Next::Refused(why) = next(from, to, &view) {
        return Err(refusal(&transfer, Direction::Forward, &why));
    }
    require(cluster, &needs(&transfer)).await?;
    let mut plan = format!(
        "Claim {from} will be deleted, and its PersistentVolume {} will be bound to a new claim {to}. Its data stay. Snapshots of it stay in namespace {}.",
        transfer.volume, from.namespace
    );
    if view.volume.is_some_and(|volume| volume.record.is_some()) {
        let _ = write!(plan, "\nAn earlier run has begun this.");
    }
    confirm(&arguments.change, &plan)?;
    if arguments.change.dry_run {
        return check_with_dry_run(&transfer, arguments).await;
    }
    finish(&transfer, Direction::Forward, arguments).await
}

/// Takes steps until the end.
async fn finish(
    transfer: &Transfer<'_>,
    direction: Direction,
    arguments: &TransferArguments,
) -> Result<()> {
    let wait = Wait {
        wait: true,
        timeout: arguments.timeout,
    };
    let done = until_end(&wait, "the transfer", || advance(transfer, direction)).await;
    print_lines(&done.map_err(|failure| {
        match failure.code {
        TIMED_OUT => Failure {
            message:
                "the transfer has not ended within --timeout; run the command again to continue it"
                    .into(),
            ..failure
        },
        _ => failure,
    }
    })?);
    Ok(())
}

fn refusal(transfer: &Transfer<'_>, direction: Direction, why: &str) -> Failure {
    let (from, to) = (&transfer.from, &transfer.to);
    Failure::failed(match direction {
        Direction::Forward => format!("claim {from} cannot be transferred to {to}: {why}"),
        Direction::Undo => format!("the transfer of claim {from} to {to} cannot be undone: {why}"),
    })
}

async fn run_undo(
    cluster: &Cluster,
    arguments: &TransferArguments,
    from: NamespacedName,
) -> Result<()> {
    let Some(transfer) = find_recorded_transfer(cluster, &from).await? else {
        return no_transfer(cluster, &from).await;
    };
    let (from, to) = (&transfer.from, &transfer.to);
    let view = transfer.read().await?.view;
    if let Next::Refused(why) = undo::next(from, to, &view) {
        return Err(refusal(&transfer, Direction::Undo, &why));
    }
    require(cluster, &needs_of_undo(&transfer)).await?;
    let old = match view.old {
        Some(_) => "",
        None => ", which is created again",
    };
    confirm(
        &arguments.change,
        &format!(
            "The transfer of claim {from} to {to} will be undone: its PersistentVolume {} goes back to claim {from}{old}.",
            transfer.volume
        ),
    )?;
    if arguments.change.dry_run {
        print_lines(&format!(
            "An earlier run has begun this; what is left is not tried{}",
            mark(&arguments.change)
        ));
        return Ok(());
    }
    finish(&transfer, Direction::Undo, arguments).await
}

/// Nothing records a transfer of the claim: it has not begun, or it has ended.
async fn no_transfer(cluster: &Cluster, from: &NamespacedName) -> Result<()> {
    let claim = cluster.find_one(&object::CLAIM, &from.namespace, &from.name);
    if claim.await?.is_some() {
        print_lines(&format!(
            "No transfer of claim {from} is recorded: there is nothing to undo."
        ));
        return Ok(());
    }
    let all = ListParams::default();
    let claims = cluster.find(&object::CLAIM, &Scope::All, &all).await?;
    let mut claims = claims.iter().flatten();
    let new = claims.find(|new| new.annotation(TRANSFERRED_FROM) == from.to_string());
    Err(Failure::failed(match new {
        Some(new) => {
            let to = NamespacedName {
                namespace: new.namespace().into(),
                name: new.name().into(),
            };
            format!(
                "the transfer of claim {from} has ended: it is {to}, and pods may use it. `{}` transfers it back",
                undo::transfer_back_command(from, &to)
            )
        }
        None => {
            format!("claim {from} does not exist, and no PersistentVolume records a transfer of it")
        }
    }))
}

/// The transfer of a claim that a PersistentVolume records.
pub async fn find_recorded_transfer<'a>(
    cluster: &'a Cluster,
    from: &NamespacedName,
) -> Result<Option<Transfer<'a>>> {
    let all = ListParams::default();
    let volumes = cluster.get_all(&object::VOLUME, &Scope::All, &all).await?;
    for volume in &volumes {
        if volume.text("/spec/csi/driver") != cluster.driver {
            continue;
        }
        let record = record_of(volume)?;
        if let Some(record) = record.filter(|record| record.from == *from) {
            return Ok(Some(Transfer {
                cluster,
                from: record.from,
                to: record.to,
                volume: volume.name().into(),
            }));
        }
    }
    Ok(None)
}

/// The transfer, which an earlier run may have begun; `None` if one has ended it.
pub async fn find_transfer(
    cluster: &Cluster,
    from: NamespacedName,
    to: NamespacedName,
) -> Result<Option<Transfer<'_>>> {
    if from.namespace == to.namespace {
        return Err(Failure::usage(format!(
            "claim {from} is in namespace {} already",
            to.namespace
        )));
    }
    let all = ListParams::default();
    let volumes = cluster.get_all(&object::VOLUME, &Scope::All, &all).await?;
    let own = volumes
        .iter()
        .filter(|volume| volume.text("/spec/csi/driver") == cluster.driver);
    // One that was begun is completed before another claim of that name goes anywhere.
    for volume in own.clone() {
        let record = record_of(volume)?;
        if record.is_some_and(|record| record.from == from) {
            let volume = volume.name().to_string();
            return Ok(Some(Transfer {
                cluster,
                from,
                to,
                volume,
            }));
        }
    }
    let claim = cluster.find_one(&object::CLAIM, &from.namespace, &from.name);
    let Some(claim) = claim.await? else {
        let new = cluster.find_one(&object::CLAIM, &to.namespace, &to.name);
        let new = new.await?;
        if new.is_some_and(|new| new.annotation(TRANSFERRED_FROM) == from.to_string()) {
            print_lines(&format!("Claim {from} is {to} already."));
            return Ok(None);
        }
        return Err(Failure::failed(format!(
            "claim {from} does not exist, and no PersistentVolume records a transfer of it"
        )));
    };
    let name = claim.text("/spec/volumeName");
    if !own.clone().any(|volume| volume.name() == name) {
        return Err(Failure::failed(format!(
            "claim {from} is not bound to a volume of {}",
            cluster.driver
        )));
    }
    Ok(Some(Transfer {
        cluster,
        volume: name.into(),
        from,
        to,
    }))
}

fn needs_of_undo<'a>(transfer: &'a Transfer<'_>) -> Vec<Need<'a>> {
    let (from, to, volume) = (&transfer.from, &transfer.to, transfer.volume.as_str());
    [
        (
            "get",
            &object::CLAIM,
            from.namespace.as_str(),
            from.name.as_str(),
        ),
        ("patch", &object::CLAIM, from.namespace.as_str(), &from.name),
        ("create", &object::CLAIM, from.namespace.as_str(), ""),
        ("get", &object::CLAIM, to.namespace.as_str(), &to.name),
        ("delete", &object::CLAIM, to.namespace.as_str(), &to.name),
        ("get", &object::VOLUME, "", volume),
        ("patch", &object::VOLUME, "", volume),
    ]
    .map(|(verb, kind, namespace, name)| Need {
        verb,
        kind,
        namespace,
        name,
    })
    .into()
}

fn needs<'a>(transfer: &'a Transfer<'_>) -> Vec<Need<'a>> {
    let need = |verb, kind: &'static Kind, namespace, name| Need {
        verb,
        kind,
        namespace,
        name,
    };
    let (from, to, volume) = (&transfer.from, &transfer.to, transfer.volume.as_str());
    vec![
        need("get", &object::CLAIM, &from.namespace, &from.name),
        need("list", &object::CLAIM, &from.namespace, ""),
        need("delete", &object::CLAIM, &from.namespace, &from.name),
        need("list", &object::POD, &from.namespace, ""),
        need("get", &object::CLAIM, &to.namespace, &to.name),
        need("create", &object::CLAIM, &to.namespace, ""),
        need("get", &object::VOLUME, "", volume),
        need("patch", &object::VOLUME, "", volume),
    ]
}

/// Takes steps until a controller has to do something, or until the end.
pub async fn advance(transfer: &Transfer<'_>, direction: Direction) -> Result<Progress> {
    let mut last = None;
    loop {
        let seen = transfer.read().await?;
        let (from, to) = (&transfer.from, &transfer.to);
        let decided = match direction {
            Direction::Forward => next(from, to, &seen.view),
            Direction::Undo => undo::next(from, to, &seen.view),
        };
        match decided {
            // An admission webhook may have changed the request, for example.
            Next::Step(step) if last == Some((step, seen.view.clone())) => {
                let why = format!(
                    "the API server did not store this step: {}",
                    describe_step(step)
                );
                return Ok(Progress::Ended(Err(refusal(transfer, direction, &why))));
            }
            Next::Step(step) => {
                let done = match direction {
                    Direction::Forward => transfer.perform(step, &seen, &Change::CONFIRMED).await?,
                    Direction::Undo => {
                        undo::perform(transfer, step, &seen, &Change::CONFIRMED).await?
                    }
                };
                if !done {
                    return Ok(Progress::Running(CHANGED.into()));
                }
                eprintln!("{}", describe_step(step));
                last = Some((step, seen.view));
            }
            Next::Wait(what) => return Ok(Progress::Running(what.into())),
            Next::Refused(why) => {
                return Ok(Progress::Ended(Err(refusal(transfer, direction, &why))));
            }
            Next::Done => {
                let volume = &transfer.volume;
                return Ok(Progress::Ended(Ok(match direction {
                    Direction::Forward => {
                        format!("Claim {from} is {to} now, with PersistentVolume {volume}.")
                    }
                    Direction::Undo => {
                        format!("Claim {from} has its PersistentVolume {volume} again.")
                    }
                })));
            }
        }
    }
}

fn describe_step(step: Step) -> &'static str {
    match step {
        Step::Record => "the transfer is recorded, and the PersistentVolume is Retain",
        Step::Retain => "the PersistentVolume is Retain again",
        Step::Delete => "the old claim is deleted",
        Step::Reserve => "the PersistentVolume is reserved for the new claim",
        Step::Create => "the new claim is created",
        Step::Restore => "the PersistentVolume has its policy again",
        Step::Mark => "it is recorded that the transfer is undone",
        Step::Keep => "the old claim stays",
        Step::Withdraw => "the new claim, which was not bound, is deleted",
        Step::GiveBack => "the PersistentVolume is reserved for the old claim",
        Step::Recreate => "the old claim is created again",
    }
}

/// The API server checks what it can check before the first step is stored.
async fn check_with_dry_run(transfer: &Transfer<'_>, arguments: &TransferArguments) -> Result<()> {
    let mark = mark(&arguments.change);
    let seen = transfer.read().await?;
    let Next::Step(Step::Record) = next(&transfer.from, &transfer.to, &seen.view) else {
        print_lines(&format!(
            "An earlier run has begun this; what is left is not tried{mark}"
        ));
        return Ok(());
    };
    for step in [Step::Record, Step::Delete] {
        if !transfer.perform(step, &seen, &arguments.change).await? {
            return Err(refusal(transfer, Direction::Forward, CHANGED));
        }
        print_lines(&format!("{}{mark}", describe_step(step)));
    }
    // The new claim was tried with the record.
    print_lines(&format!("{}{mark}", describe_step(Step::Create)));
    Ok(())
}
