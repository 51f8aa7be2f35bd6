//! What is wrong, since when, and the command that shows more of it.

use crate::model::size::is_low_space;
use jiff::{SignedDuration, Timestamp};

use super::text::{When, command, duration, shown};
use super::world::{Agent, Frozen, Pool, Schedule, Work, World};
use serde::Serialize;

/// A Pool object is written at least once a minute while a router leads and its agent answers.
pub(super) const STALE: SignedDuration = SignedDuration::from_mins(3);
/// A pool that will be full within this time is a problem, as for the alert SlackwaterPoolWillBeFull.
const FULL_SOON: SignedDuration = SignedDuration::from_hours(24);
/// But not while at least this part of it is free, in percent, as for that alert.
const ENOUGH_SPACE_PERCENT: u64 = 40;

/// A freeze that had lasted for this time when it was reported is a problem: a cut takes milliseconds, and
/// at most seconds.
const LONG_FREEZE: SignedDuration = SignedDuration::from_mins(1);

/// Something that a person should look at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What is wrong.
    pub text: String,
    /// Since when; `None` if objects do not have this.
    pub since: Option<When>,
    /// What shows more of it; `None` if a name in it cannot be written in a command line.
    pub command: Option<String>,
    /// The worst have 0.
    #[serde(skip)]
    rank: u8,
}

impl Problem {
    fn new(rank: u8, text: &str, since: Option<Timestamp>, words: &[&str], now: Timestamp) -> Self {
        Problem {
            text: shown(text),
            since: since.map(|since| When::new(since, now)),
            command: command(words),
            rank,
        }
    }
}

/// All problems, the worst and oldest first.
pub(super) fn problems(world: &World) -> Vec<Problem> {
    let mut found = Vec::new();
    if let Some(problem) = &world.problem {
        let text = format!("what is shown may be outdated: {problem}");
        let mut words = vec!["kubectl", "--namespace", &world.namespace, "logs"];
        words.extend([world.router.as_str(), "--container", "router"]);
        found.push(Problem::new(0, &text, None, &words, world.now));
    }
    found.extend(world.pools.iter().filter_map(|pool| of_pool(world, pool)));
    found.extend(world.pools.iter().filter_map(|pool| of_frozen(world, pool)));
    let agents = world.agents.iter();
    found.extend(agents.filter_map(|agent| of_agent(world, agent)));
    let schedules = world.schedules.iter().flatten();
    found.extend(schedules.filter_map(|schedule| of_schedule(world, schedule)));
    found.extend(world.work.iter().filter_map(|work| of_work(world, work)));
    let age = |problem: &Problem| problem.since.as_ref().map_or(0, |since| since.age_seconds);
    found.sort_by_key(|problem| (problem.rank, std::cmp::Reverse(age(problem))));
    found
}

/// Whether the status of a pool is too old to be called its state.
pub(super) fn is_stale(pool: &Pool, now: Timestamp) -> bool {
    let age = pool.seen.map(|seen| now.duration_since(seen));
    !pool.is_gone && age.is_none_or(|age| age > STALE)
}

/// Whether a freeze is a problem. What was reported may have ended since then, so its age is that of the
/// report, unless nothing reports it any more.
fn is_long(pool: &Pool, one: &Frozen, now: Timestamp) -> bool {
    let seen = pool.seen.filter(|_| !is_stale(pool, now)).unwrap_or(now);
    seen.duration_since(one.since) >= LONG_FREEZE || seen > one.until
}

fn of_frozen(world: &World, pool: &Pool) -> Option<Problem> {
    if pool.is_gone {
        return None;
    }
    let long = pool.frozen.iter();
    let long = long.filter(|one| is_long(pool, one, world.now));
    let oldest = long.clone().min_by_key(|one| (one.since, &one.volume))?;
    let what = match &oldest.claim {
        Some(claim) => format!("the file system of claim {claim}"),
        None => format!("the file system of volume {}", oldest.volume),
    };
    let others = match long.count() {
        1 => String::new(),
        count => format!(", and {} more of its pool,", count - 1),
    };
    let was = match is_stale(pool, world.now) {
        true => "was frozen for a cut when its node was seen last",
        false => "is frozen for longer than a cut takes",
    };
    let text = format!("{what} on node {}{others} {was}", pool.node);
    let words = ["kubectl", "slackwater", "frozen"];
    Some(Problem::new(
        1,
        &text,
        Some(oldest.since),
        &words,
        world.now,
    ))
}

/// When a pool is full, if that is so soon that it is a problem.
fn full_soon(world: &World, pool: &Pool, free: u64) -> Option<Timestamp> {
    let at = pool.full_at?;
    (free < ENOUGH_SPACE_PERCENT && at.duration_since(world.now) < FULL_SOON).then_some(at)
}

fn of_pool(world: &World, pool: &Pool) -> Option<Problem> {
    let name = match pool.node.is_empty() {
        true => format!("pool {}", pool.id),
        false => format!("pool {} of node {}", pool.name, pool.node),
    };
    let free = pool.available_bytes.saturating_mul(100) / pool.total_bytes.max(1);
    let (rank, text, since) = if pool.is_gone {
        return None;
    } else if !pool.is_well {
        let text = format!("{name} is {}: {}", pool.health, pool.message);
        (1, text, pool.since)
    } else if is_stale(pool, world.now) {
        let text = format!("{name} was {}, but is not reported any more", pool.health);
        (1, text, pool.seen)
    } else if pool.total_bytes > 0 && is_low_space(pool.available_bytes, pool.total_bytes) {
        (2, format!("less than 5 % of {name} is free"), None)
    } else if let Some(at) = full_soon(world, pool, free) {
        let time = duration(at.duration_since(world.now).as_secs().max(0));
        let text = format!("{name} will be full in {time}, if it fills as it did in the last day");
        (2, text, None)
    } else {
        return None;
    };
    let object = format!("pools.slackwater.dev/{}", pool.id);
    let words = ["kubectl", "describe", &object];
    Some(Problem::new(rank, &text, since, &words, world.now))
}

fn of_agent(world: &World, agent: &Agent) -> Option<Problem> {
    let name = format!("the agent of node {}", agent.node);
    let (rank, text, since) = match (&agent.problem, agent.seen) {
        (Some(problem), seen) => (1, format!("{name} cannot be reached: {problem}"), seen),
        (None, None) => (2, format!("{name} has not answered yet"), None),
        (None, Some(_)) if !agent.has_guard => {
            let text = format!(
                "the freeze guard of node {} does not respond, so no file system can be frozen there",
                agent.node
            );
            (1, text, None)
        }
        (None, Some(_)) => match agent.missing.first() {
            Some(missing) => (2, format!("node {}: {missing}", agent.node), None),
            None => return None,
        },
    };
    let field = format!("spec.nodeName={}", agent.node);
    let words = ["kubectl", "--namespace", &world.namespace, "get", "pods"];
    let words = [&words[..], &["--output=wide", "--field-selector", &field]].concat();
    Some(Problem::new(rank, &text, since, &words, world.now))
}

fn of_schedule(world: &World, schedule: &Schedule) -> Option<Problem> {
    let name = format!("schedule {}/{}", schedule.namespace, schedule.name);
    let (text, since) = match (schedule.failing.first(), schedule.overdue) {
        (Some((since, what)), overdue) => (format!("{name}: {what}"), overdue.or(Some(*since))),
        (None, Some(overdue)) if !schedule.is_suspended => (
            format!("{name} has no good snapshot of a slot whose time has come"),
            Some(overdue),
        ),
        (None, _) => return None,
    };
    let kind = "snapshotschedules.slackwater.dev";
    let command = object(&schedule.namespace, kind, &schedule.name);
    let command: Vec<_> = command.iter().map(String::as_str).collect();
    Some(Problem::new(1, &text, since, &command, world.now))
}

fn of_work(world: &World, work: &Work) -> Option<Problem> {
    let since = work.failing?;
    let text = format!("{} failed: {}", work.what, work.message);
    let kind = format!("{}.slackwater.dev", work.resource);
    let command = object(&work.namespace, &kind, &work.name);
    let command: Vec<_> = command.iter().map(String::as_str).collect();
    Some(Problem::new(2, &text, Some(since), &command, world.now))
}

/// The words of the command that shows an object of a namespace.
fn object(namespace: &str, kind: &str, name: &str) -> [String; 5] {
    let words = ["kubectl", "--namespace", namespace, "describe"];
    let [a, b, c, d] = words.map(String::from);
    [a, b, c, d, format!("{kind}/{name}")]
}
