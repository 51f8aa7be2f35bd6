//! Turns: how many pods fill volumes at the same time, and which claim is next.
//!
//! A claim has its turn from the creation of its prime claim to the end of its pod. The API server is the
//! memory of that: the leader counts prime claims. What this process has begun, and the watch of claims
//! does not show yet, is remembered in addition.
//!
//! The order is fair between namespaces: the one with the fewest turns is next, and in it the oldest claim
//! (docs/adr/0056-...).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::Populators;
use super::cache::has_source;
use super::source::source_of;
use super::state::{
    POD, State, WAITS_FOR_TURN, annotation, is_bound, is_leaving, is_of, prime_name, uid,
};

/// A volume that is not created after this time takes no turn: that of a claim which no node has space for
/// would keep it for ever.
const PROVISION_TIMEOUT: SignedDuration = SignedDuration::from_mins(5);
/// After this time, the watch of claims shows what was begun, or it was not.
const BEGIN_INTERVAL: Duration = Duration::from_secs(30);
/// A claim whose content may be cached waits without a request for this time. Then it is checked whether there is
/// a snapshot, for which it needs no turn.
const CACHE_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// The most pods at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In the whole cluster.
    pub all: usize,
    pub in_namespace: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            all: 16,
            in_namespace: 4,
        }
    }
}

/// Which claims have their turn, and which wait for it. Claims are named by their UIDs.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns {
    limits: Limits,
    /// By namespace.
    taken: BTreeMap<String, BTreeSet<String>>,
    /// By namespace, the oldest first.
    waiting: BTreeMap<String, BTreeSet<(Timestamp, String)>>,
}

impl Turns {
    pub(super) fn new(limits: Limits) -> Turns {
        Turns {
            limits,
            ..Turns::default()
        }
    }

    pub(super) fn take(&mut self, namespace: &str, uid: &str) {
        let its = self.taken.entry(namespace.into()).or_default();
        its.insert(uid.into());
    }

    pub(super) fn wait(&mut self, claim: &PersistentVolumeClaim) {
        let its = self.waiting.entry(namespace_of(claim).into()).or_default();
        its.insert((created_at(claim), uid(claim).into()));
    }

    pub(super) fn count(&self, namespace: &str) -> usize {
        self.taken.get(namespace).map_or(0, BTreeSet::len)
    }

    /// Those of each namespace. Users can create claims that look like prime claims. They take no turns of
    /// other namespaces.
    pub(super) fn counts(&self) -> impl Iterator<Item = usize> {
        let counts = self.taken.values().map(BTreeSet::len);
        counts.map(|one| one.min(self.limits.in_namespace))
    }

    /// Those whose turn it is.
    pub(super) fn next(&self) -> BTreeSet<&str> {
        let all = self.counts().sum::<usize>();
        let mut queues: BTreeMap<&str, _> = BTreeMap::new();
        for (namespace, its) in &self.waiting {
            let taken = self.taken.get(namespace);
            let has_turn = move |uid: &String| taken.is_some_and(|taken| taken.contains(uid));
            let queue = its.iter().filter(move |(_, uid)| !has_turn(uid));
            let queue = (self.count(namespace), queue.peekable());
            queues.insert(namespace, queue);
        }
        let mut next = BTreeSet::new();
        for _ in all..self.limits.all {
            let ready = queues.values_mut().filter_map(|(count, queue)| {
                let first = queue.peek().copied()?;
                (*count < self.limits.in_namespace).then_some(((*count, first), count, queue))
            });
            let Some((_, count, queue)) = ready.min_by_key(|(order, ..)| *order) else {
                break;
            };
            *count += 1;
            next.extend(queue.next().map(|(_, uid)| uid.as_str()));
        }
        next
    }

    /// Why a claim has to wait; `None` if it is its turn.
    pub(super) fn refusal(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let namespace = namespace_of(claim);
        let taken = self.taken.get(namespace);
        if taken.is_some_and(|its| its.contains(uid(claim))) {
            return None;
        }
        let mut with = self.clone();
        with.wait(claim);
        match with.next().contains(uid(claim)) {
            true => None,
            false => Some(self.message(namespace)),
        }
    }

    fn message(&self, namespace: &str) -> String {
        let Limits { all, in_namespace } = self.limits;
        match self.count(namespace) >= in_namespace {
            true => format!(
                "{in_namespace} pods may fill volumes of namespace {namespace} at the same time (populators.maxPodsPerNamespace); the claim waits for its turn"
            ),
            false => format!(
                "{all} pods may fill volumes at the same time (populators.maxPods); the claim waits for its turn"
            ),
        }
    }
}

fn namespace_of(claim: &PersistentVolumeClaim) -> &str {
    claim.metadata.namespace.as_deref().unwrap_or_default()
}

fn created_at(claim: &PersistentVolumeClaim) -> Timestamp {
    let created_at = claim.metadata.creation_timestamp.as_ref();
    created_at.map_or(Timestamp::MIN, |time| time.0)
}

/// Whether a claim has its turn: a pod fills the volume of its prime claim, or will as soon as that was
/// created. An attempt that continues after a pause waits for another turn.
pub(super) fn has_turn(
    claim: &PersistentVolumeClaim,
    prime: &PersistentVolumeClaim,
    now: Timestamp,
) -> bool {
    if !is_of(prime, claim) || is_bound(claim) || has_source(prime) {
        return false;
    }
    match annotation(prime, POD) {
        Some(pod) => State::of(claim).failed_pod.as_deref() != Some(pod),
        None => now.duration_since(created_at(prime)) < PROVISION_TIMEOUT,
    }
}

/// What one pass over all claims knows, so that claims that wait cost no request.
pub(super) struct Pass {
    waiting: BTreeSet<String>,
    next: BTreeSet<String>,
    turns: Turns,
}

impl Pass {
    pub(super) fn new(turns: Turns) -> Pass {
        let waiting = turns.waiting.values().flatten();
        Pass {
            waiting: waiting.map(|(_, uid)| uid.clone()).collect(),
            next: turns.next().into_iter().map(str::to_string).collect(),
            turns,
        }
    }

    /// Why a claim that has waited before waits for longer. For others it is decided when they are observed.
    pub(super) fn refusal(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let waits = self.waiting.contains(uid(claim)) && !self.next.contains(uid(claim));
        waits.then(|| self.turns.message(namespace_of(claim)))
    }
}

/// What the leader remembers of turns. Losing it costs nothing: it sees the prime claims by then.
#[derive(Debug, Default)]
pub(super) struct TurnMemory {
    /// Turns that were taken, by the UIDs of claims: the prime claim and its pod as they were before.
    begun: BTreeMap<String, (Option<Mark>, Instant)>,
    /// When claims that wait were observed.
    observed: BTreeMap<String, Instant>,
}

/// The UID of a prime claim, and the pod that is recorded there.
type Mark = (String, Option<String>);

fn mark(prime: &PersistentVolumeClaim) -> Mark {
    (
        uid(prime).into(),
        annotation(prime, POD).map(str::to_string),
    )
}

impl TurnMemory {
    /// A turn that was taken for something that was not done.
    pub(super) fn give_back(&mut self, uid: &str) {
        self.begun.remove(uid);
    }

    pub(super) fn set_observed(&mut self, uid: &str, now: Instant) {
        self.observed.insert(uid.into(), now);
    }

    /// Whether it is time to look for a cached snapshot of a claim that waits.
    pub(super) fn is_due(&self, uid: &str, now: Instant) -> bool {
        let last = self.observed.get(uid);
        last.is_none_or(|last| now.duration_since(*last) >= CACHE_POLL_INTERVAL)
    }

    pub(super) fn retain(&mut self, is_one: impl Fn(&str) -> bool) {
        self.begun.retain(|uid, _| is_one(uid));
        self.observed.retain(|uid, _| is_one(uid));
    }
}

/// The turns as they are known now.
pub(super) fn read(populators: &Populators) -> Turns {
    with_turns(populators, |turns, _| turns)
}

/// Calls a function with the turns as they are known, before they can change.
fn with_turns<T>(populators: &Populators, then: impl FnOnce(Turns, &mut TurnMemory) -> T) -> T {
    let all = populators.claims.read();
    let all = all.unwrap_or_else(PoisonError::into_inner);
    let settings = &populators.options.settings;
    let is_own = |claim: &PersistentVolumeClaim| {
        let spec = claim.spec.as_ref();
        let class = spec.and_then(|spec| spec.storage_class_name.as_deref());
        let class = class.and_then(|name| populators.class(name));
        source_of(claim).is_some() && class.is_some_and(|class| class.driver == settings.driver)
    };
    let mut memory = populators.memory();
    let waits = |claim: &&PersistentVolumeClaim| {
        let shown = memory.shown(uid(*claim));
        shown.is_some_and(|shown| shown.reason == WAITS_FOR_TURN)
    };
    let waiting = all.now().values().filter(waits);
    let waiting = waiting.map(|claim| uid(claim).to_string()).collect();
    let turns = count(
        settings.limits,
        all.now(),
        &mut memory.turns,
        &waiting,
        is_own,
    );
    then(turns, &mut memory.turns)
}

fn count(
    limits: Limits,
    all: &BTreeMap<String, PersistentVolumeClaim>,
    memory: &mut TurnMemory,
    waiting: &BTreeSet<String>,
    is_own: impl Fn(&PersistentVolumeClaim) -> bool,
) -> Turns {
    let (now, instant) = (Timestamp::now(), Instant::now());
    let mut turns = Turns::new(limits);
    for claim in all.values() {
        if is_leaving(claim) || !is_own(claim) {
            continue;
        }
        let prime = all.get(&format!("{}/{}", namespace_of(claim), prime_name(claim)));
        let key = uid(claim);
        let begun = memory.begun.get(key);
        let is_begun = begun.is_some_and(|(before, since)| {
            let is_shown = prime.is_some_and(|prime| before.as_ref() != Some(&mark(prime)));
            !is_shown && instant.duration_since(*since) < BEGIN_INTERVAL
        });
        if begun.is_some() && !is_begun {
            memory.begun.remove(key);
        }
        if is_begun || prime.is_some_and(|prime| has_turn(claim, prime, now)) {
            turns.take(namespace_of(claim), key);
        } else if waiting.contains(key) {
            turns.wait(claim);
        }
    }
    turns
}

/// Takes a turn for a claim, before its prime claim or its pod is created. `false` if it is not its turn any
/// more.
pub(super) fn take(
    populators: &Populators,
    claim: &PersistentVolumeClaim,
    prime: Option<&PersistentVolumeClaim>,
) -> bool {
    with_turns(populators, |turns, memory| {
        let is_next = turns.refusal(claim).is_none();
        if is_next {
            let begun = (prime.map(mark), Instant::now());
            memory.begun.insert(uid(claim).into(), begun);
        }
        is_next
    })
}

#[cfg(test)]
mod tests;
