//! `restore`: creates claims from a snapshot, or from all members of a group snapshot.
//!
//! Each claim has an annotation with the UID of its snapshot, so a command that was interrupted
//! anywhere is repeated: it creates what is missing.

mod names;
mod plan;
mod report;
mod source;
mod stateful;
mod wait;

use std::collections::BTreeSet;

use kube::api::ListParams;

use crate::change::{Need, Progress, confirm, create, mark, require, say, until_end};
use crate::cli::{Format, RestoreArguments};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing;
use crate::object;
use crate::watch::write;

use plan::{Copy, State};
use stateful::Stateful;

/// Creates the claims.
pub async fn run(cluster: &Cluster, arguments: &RestoreArguments) -> Result<()> {
    let plan = Plan::read(cluster, arguments).await?;
    plan.refuse_pods(cluster).await?;
    require(cluster, &plan.needs(cluster)).await?;
    plan.confirm(cluster, arguments)?;
    carry_out(cluster, plan, arguments).await
}

/// What is to be done.
struct Plan {
    title: String,
    copies: Vec<Copy>,
    /// The StatefulSet that will use the claims, if it is named and exists.
    user: Option<Stateful>,
    /// Classes whose volumes are created at once.
    immediate: BTreeSet<String>,
    /// How the claims of a StatefulSet are put to use.
    advice: Option<String>,
}

impl Plan {
    /// Refuses what would fail later, or leave an application with some of its volumes.
    async fn read(cluster: &Cluster, arguments: &RestoreArguments) -> Result<Plan> {
        let source = source::find(cluster, &arguments.source).await?;
        let set = match &arguments.statefulset {
            Some(name) => Some(stateful::find(cluster, name).await?),
            None => None,
        };
        // With a suffix, the claims are those of another StatefulSet, which does not exist yet.
        let is_user = arguments.suffix.is_none();
        if let Some(set) = set.as_ref().filter(|_| is_user) {
            set.refuse_managed(cluster).await?;
        }
        let copies = plan::copies(cluster, &source, set.as_ref(), arguments).await?;
        let mut advice = None;
        if let Some(set) = &set {
            let slots = set.slots(&source.members)?;
            if is_user {
                set.refuse_gaps(cluster, &slots).await?;
            }
            advice = Some(set.advice(&slots, arguments.suffix.as_deref()));
        }
        Ok(Plan {
            advice,
            title: source.title,
            immediate: wait::immediate(cluster, &copies).await?,
            copies,
            user: set.filter(|_| is_user),
        })
    }

    /// Refuses pods that would start while other claims are not restored yet. Read again before each
    /// claim is created.
    async fn refuse_pods(&self, cluster: &Cluster) -> Result<()> {
        let missing = self.copies.iter().filter(|it| it.state == State::Planned);
        let missing: Vec<_> = missing.map(|copy| copy.claim.as_str()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let scope = Scope::Namespace(cluster.namespace.clone());
        let all = ListParams::default();
        let pods = cluster.get_all(&object::POD, &scope, &all).await?;
        if let Some(set) = &self.user {
            set.refuse_pods(cluster, &pods).await?;
        }
        stateful::refuse_users(&pods, &missing)
    }

    /// All permissions of all steps. Those for what was read already are among them, because it is read
    /// again.
    fn needs<'a>(&self, cluster: &'a Cluster) -> Vec<Need<'a>> {
        let mut verbs = vec![
            ("create", &object::CLAIM),
            ("get", &object::CLAIM),
            ("list", &object::POD),
        ];
        if self.user.is_some() {
            verbs.push(("get", &object::STATEFUL_SET));
        }
        let need = |(verb, kind)| Need {
            verb,
            kind,
            namespace: &cluster.namespace,
            name: "",
        };
        verbs.into_iter().map(need).collect()
    }

    /// Prints the plan. Programs get it as they get the result.
    fn confirm(&self, cluster: &Cluster, arguments: &RestoreArguments) -> Result<()> {
        let format = arguments.output.format;
        if !is_for_people(format) {
            return match arguments.change.yes || arguments.change.dry_run {
                true => Ok(()),
                false => {
                    print(cluster, &self.copies, format)?;
                    Err(Failure::unconfirmed())
                }
            };
        }
        for note in listing::notes(&cluster.take_notes()) {
            eprintln!("{note}");
        }
        let plan = format!(
            "{} will be restored into claims of namespace {}:\n{}",
            self.title,
            cluster.namespace,
            report::plan(&self.copies, format)
        );
        confirm(&arguments.change, &plan)
    }
}

fn is_for_people(format: Format) -> bool {
    matches!(format, Format::Table | Format::Wide)
}

fn print(cluster: &Cluster, copies: &[Copy], format: Format) -> Result<()> {
    let listing = report::listing(&cluster.namespace, copies, cluster.take_notes());
    write(&listing.print(format, true)?, &[]);
    Ok(())
}

async fn carry_out(cluster: &Cluster, mut plan: Plan, arguments: &RestoreArguments) -> Result<()> {
    let (change, format) = (&arguments.change, arguments.output.format);
    for at in 0..plan.copies.len() {
        let copy = &plan.copies[at];
        if copy.state != State::Planned {
            continue;
        }
        plan.refuse_pods(cluster).await?;
        let claim = copy.manifest();
        create(cluster, change, &object::CLAIM, &cluster.namespace, claim).await?;
        if is_for_people(format) {
            let name = &copy.claim;
            say(&format!(
                "persistentvolumeclaim/{name} created{}",
                mark(change)
            ));
        }
        plan.copies[at].state = State::Created;
    }
    if change.dry_run {
        return match is_for_people(format) {
            true => Ok(()),
            false => print(cluster, &plan.copies, format),
        };
    }
    let read = || wait::progress(cluster, &plan.copies, &plan.immediate);
    let last = match arguments.wait.wait {
        true => {
            let what = format!("the restore of {}", plan.title);
            until_end(&arguments.wait, &what, read).await?
        }
        false => match read().await? {
            Progress::Running(line) => line,
            Progress::Ended(result) => result?,
        },
    };
    wait::refresh(cluster, &mut plan.copies).await?;
    if !is_for_people(format) {
        return print(cluster, &plan.copies, format);
    }
    say(&last);
    if let Some(advice) = &plan.advice {
        say(advice);
    }
    Ok(())
}
