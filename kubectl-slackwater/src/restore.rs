//! `restore`: creates claims from a snapshot, or from all members of a group snapshot.
//!
//! Each claim has an annotation with the UID of its snapshot, so a command that was interrupted
//! anywhere is repeated: it creates what is missing.

pub mod cross_namespace;
pub mod deleted_namespace;
mod group_snapshot;
mod nodes;
mod plan;
mod report;
pub mod source;
mod stateful_set;
mod storage_class;
mod verify;
mod wait;

use kube::api::ListParams;

use crate::change::{Need, Progress, create, delete, mark, print_lines, require, until_end};
use crate::cli::RestoreArguments;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};

use plan::{Copy, State};
use report::is_for_people;
use stateful_set::StatefulSet;
use storage_class::Classes;

/// Creates the claims.
pub async fn run(cluster: &Cluster, arguments: &RestoreArguments) -> Result<()> {
    if let Some(which) = deleted_namespace::ContentName::of(&arguments.source) {
        return deleted_namespace::run(cluster, arguments, &which).await;
    }
    if !arguments.claims.is_empty() {
        return Err(Failure::usage(
            "--claim is only for volumesnapshotcontent/NAME and volumegroupsnapshotcontent/NAME"
                .into(),
        ));
    }
    if let Some(namespace) = &arguments.to_namespace {
        return cross_namespace::run(cluster, arguments, namespace).await;
    }
    let plan = Plan::read(cluster, arguments).await?;
    plan.refuse_pods(cluster).await?;
    verify::refuse(&arguments.check, &plan.copies)?;
    if arguments.check.verify.is_some() {
        let is_at_source = |copy: &Copy| {
            let class = plan.classes.get(&copy.class);
            class.is_some_and(|class| class.is_immediate || class.is_at_source)
        };
        nodes::refuse_several_nodes(cluster, &plan.copies, is_at_source, "Give a --storage-class with volumeBindingMode WaitForFirstConsumer and without `restore: source`, whose volumes are created on the node of the pod, and another --suffix if claims exist; or check single members by the names of their VolumeSnapshots").await?;
    }
    require(cluster, &plan.needs(cluster, arguments)).await?;
    plan.confirm(cluster, arguments)?;
    execute(cluster, plan, arguments).await
}

/// What is to be done.
struct Plan {
    title: String,
    copies: Vec<Copy>,
    /// The StatefulSet that will use the claims, if it is named and exists.
    user: Option<StatefulSet>,
    classes: Classes,
    /// How the claims of a StatefulSet are put to use.
    advice: Option<String>,
    /// Claims of the StatefulSet that no member restores.
    kept: Vec<String>,
}

impl Plan {
    /// Refuses what would fail later, or leave an application with some of its volumes.
    async fn read(cluster: &Cluster, arguments: &RestoreArguments) -> Result<Plan> {
        let source = source::get(cluster, &arguments.source).await?;
        source.refuse_unsized()?;
        let set = arguments.statefulset.as_deref();
        let set = stateful_set::find(cluster, &cluster.namespace, set).await?;
        // With a suffix, the claims are those of another StatefulSet, which does not exist yet.
        let is_user = arguments.suffix.is_none();
        if let Some(set) = set.as_ref().filter(|_| is_user) {
            set.refuse_managed(cluster).await?;
        }
        let mut copies = plan::copies(cluster, &source, set.as_ref(), arguments).await?;
        storage_class::resolve(cluster, &mut copies).await?;
        let (mut advice, mut kept) = (None, Vec::new());
        if let Some(set) = &set {
            let slots = set.slots(&source.members)?;
            if is_user {
                kept = set.refuse_gaps(cluster, &slots).await?;
            }
            advice = Some(set.advice(&slots, arguments.suffix.as_deref()));
        }
        Ok(Plan {
            advice,
            kept,
            title: source.title,
            classes: storage_class::read(cluster, &copies).await?,
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
        stateful_set::refuse_users(&pods, &missing)
    }

    /// All permissions of all steps. Those for what was read already are among them, because it is read
    /// again.
    fn needs<'a>(&self, cluster: &'a Cluster, arguments: &RestoreArguments) -> Vec<Need<'a>> {
        let mut verbs = vec![
            ("create", &object::CLAIM),
            ("get", &object::CLAIM),
            ("list", &object::POD),
        ];
        if self.user.is_some() {
            verbs.push(("get", &object::STATEFUL_SET));
        }
        if arguments.check.verify.is_some() {
            verbs.extend(["create", "get", "delete"].map(|verb| (verb, &object::POD)));
        }
        if arguments.check.discard {
            verbs.push(("delete", &object::CLAIM));
        }
        let need = |(verb, kind)| Need {
            verb,
            kind,
            namespace: &cluster.namespace,
            name: "",
        };
        verbs.into_iter().map(need).collect()
    }

    fn confirm(&self, cluster: &Cluster, arguments: &RestoreArguments) -> Result<()> {
        let plan = || {
            let mut plan = format!(
                "{} will be restored into claims of namespace {}:\n{}{}",
                self.title,
                cluster.namespace,
                report::plan(&self.copies, arguments.output.format),
                report::kept(&self.kept)
            );
            if arguments.check.verify.is_some() {
                plan = format!("{plan}\n{}", verify::plan(&arguments.check));
            }
            plan
        };
        report::confirm(cluster, arguments, (&cluster.namespace, &self.copies), plan)
    }
}

async fn execute(cluster: &Cluster, mut plan: Plan, arguments: &RestoreArguments) -> Result<()> {
    let format = arguments.output.format;
    verify::check_with_dry_run(cluster, arguments, &plan.copies).await?;
    let done = match create_claims(cluster, &mut plan, arguments).await {
        Ok(()) => check_or_wait(cluster, &plan, arguments).await,
        Err(failure) if !arguments.check.discard => return Err(failure),
        // Those that were created until then are deleted, too.
        Err(failure) => Err(failure),
    };
    let cleaned = match arguments.check.discard {
        true => discard(cluster, &mut plan, arguments).await,
        false if arguments.change.dry_run => Ok(()),
        false => wait::refresh(cluster, &mut plan.copies).await,
    };
    if !is_for_people(format) {
        report::print(cluster, &cluster.namespace, &plan.copies, format)?;
        return combine_results(done, cleaned).map(|_| ());
    }
    if let (Ok(last), Err(_)) = (&done, &cleaned) {
        print_lines(last);
    }
    let last = combine_results(done, cleaned)?;
    if !last.is_empty() {
        print_lines(&last);
    }
    let is_left = !arguments.change.dry_run && !arguments.check.discard;
    if let Some(advice) = plan.advice.filter(|_| is_left) {
        print_lines(&advice);
    }
    Ok(())
}

async fn check_or_wait(
    cluster: &Cluster,
    plan: &Plan,
    arguments: &RestoreArguments,
) -> Result<String> {
    match &arguments.check.verify {
        Some(_) => check(cluster, plan, arguments).await,
        None if arguments.change.dry_run => Ok(String::new()),
        None => wait_for(cluster, plan, arguments).await,
    }
}

/// The result of the restore, and after it that of the clean-up.
fn combine_results(done: Result<String>, cleaned: Result<()>) -> Result<String> {
    match (done, cleaned) {
        (Err(failure), Err(other)) => Err(Failure {
            message: format!("{}; then: {}", failure.message, other.message),
            ..failure
        }),
        (done, Ok(())) => done,
        (Ok(_), Err(other)) => Err(other),
    }
}

/// Creates the claims that do not exist yet.
async fn create_claims(
    cluster: &Cluster,
    plan: &mut Plan,
    arguments: &RestoreArguments,
) -> Result<()> {
    let change = &arguments.change;
    for at in 0..plan.copies.len() {
        let copy = &plan.copies[at];
        if copy.state != State::Planned {
            continue;
        }
        plan.refuse_pods(cluster).await?;
        let claim = copy.manifest();
        let made = create(cluster, change, &object::CLAIM, &cluster.namespace, claim);
        let made = made.await?;
        if is_for_people(arguments.output.format) {
            let name = &copy.claim;
            print_lines(&format!(
                "persistentvolumeclaim/{name} created{}",
                mark(change)
            ));
        }
        if !change.dry_run {
            plan.copies[at].state = State::Created;
        }
        plan.copies[at].uid = made.metadata.uid.unwrap_or_default();
    }
    Ok(())
}

async fn check(cluster: &Cluster, plan: &Plan, arguments: &RestoreArguments) -> Result<String> {
    if arguments.check.discard {
        refuse_users(cluster, &plan.copies).await?;
    }
    verify::run(cluster, arguments, &plan.copies).await
}

/// Refuses to write to copies, or to delete them, while a pod other than that of the check uses one.
async fn refuse_users(cluster: &Cluster, copies: &[Copy]) -> Result<()> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    let all = ListParams::default();
    let mut pods = cluster.get_all(&object::POD, &scope, &all).await?;
    let own = verify::name(copies);
    pods.retain(|pod| pod.name() != own);
    let claims: Vec<_> = copies.iter().map(|copy| copy.claim.as_str()).collect();
    match stateful_set::user_of(&pods, &claims) {
        None => Ok(()),
        Some((pod, claim)) => Err(Failure::failed(format!(
            "pod {pod} uses the claim {claim}, which was created for the check: claims are not deleted while a pod uses one"
        ))),
    }
}

async fn wait_for(cluster: &Cluster, plan: &Plan, arguments: &RestoreArguments) -> Result<String> {
    let read = || wait::progress(cluster, &plan.copies, &plan.classes);
    if arguments.wait.wait {
        let what = format!("the restore of {}", plan.title);
        return until_end(&arguments.wait, &what, read).await;
    }
    match read().await? {
        Progress::Running(line) => Ok(line),
        Progress::Ended(result) => result,
    }
}

/// Deletes the claims: exactly those that were checked.
async fn discard(cluster: &Cluster, plan: &mut Plan, arguments: &RestoreArguments) -> Result<()> {
    let change = &arguments.change;
    for at in 0..plan.copies.len() {
        let namespace = &cluster.namespace;
        // With --dry-run it does not exist.
        if !change.dry_run {
            if plan.copies[at].state != State::Created {
                continue;
            }
            refuse_users(cluster, &plan.copies).await?;
            let copy = &mut plan.copies[at];
            delete(
                cluster,
                change,
                &object::CLAIM,
                namespace,
                &copy.claim,
                (&copy.uid, None),
            )
            .await?;
            copy.state = State::Discarded;
        }
        if is_for_people(arguments.output.format) {
            print_lines(&format!(
                "persistentvolumeclaim/{} deleted{}",
                plan.copies[at].claim,
                mark(change)
            ));
        }
    }
    Ok(())
}
