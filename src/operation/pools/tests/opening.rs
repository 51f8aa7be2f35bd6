//! Openings that take long, or that a crash interrupts.

use std::time::Duration;

use super::*;

/// Starts with a second pool, and waits for none.
fn start_beside(host: &MemoryHost, second: &str) -> Driver {
    let settings = Settings {
        alone: false,
        ..settings(&[definition(), pool(second)])
    };
    let max_wait = Duration::from_millis(100);
    Driver::start_within(settings, CutInterfaces::simulated(host.clone()), max_wait).unwrap()
}

#[test]
fn a_mistake_in_a_definition_does_not_end_a_driver_that_opens_another_pool() {
    let host = MemoryHost::new();
    let delay = host.delay_effects("fill_with_zeros", 0);
    let driver = start_beside(&host, "b=file:/nowhere/b");
    assert!(delay.is_reached());
    let why = refusal(&driver).unwrap();
    assert!(why.contains("still being opened"), "{why}");
    let b = driver.pool_status().remove(1).refusal.unwrap();
    assert!(b.contains("does not exist"), "{b}");
}

#[test]
fn a_pool_whose_opening_takes_long_is_served_when_it_is_open() {
    for step in ["fill_with_zeros", "format", "mount"] {
        let host = MemoryHost::new();
        host.make_folder(Path::new("/memory/b")).unwrap();
        let delay = host.delay_effects(step, 0);
        let driver = start_beside(&host, "b=file:/memory/b,init,mount=any");
        assert!(delay.is_reached());
        driver.probe_pool_within("default", Duration::from_millis(10));
        let why = refusal(&driver).unwrap();
        assert!(why.contains("still being opened"), "{step}: {why}");
        let b = driver.pool_status().remove(1);
        assert_eq!(b.refusal, None, "{step}: the other pool is served");
        drop(delay);
        for _ in 0..6000 {
            driver.probe_pool("default");
            if refusal(&driver).is_none() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(refusal(&driver), None, "{step}");
        volume(&driver, "a");
        let log = host.effect_log();
        let times = |name: &str| log.iter().filter(|effect| effect.starts_with(name)).count();
        for once in ["fill_with_zeros ", "format ", "mount "] {
            assert_eq!(times(once), 1, "{step}: {once} in {log:?}");
        }
        assert_eq!(host.violations(), Vec::<String>::new(), "{step}");
    }
}

#[test]
fn records_that_were_allocated_before_a_crash_are_not_written_again() {
    let host = MemoryHost::new();
    let is_fill = |effect: &String| effect.starts_with("fill_with_zeros ");
    let at = {
        let host = MemoryHost::new();
        start(&host);
        1 + host.effect_log().iter().position(is_fill).unwrap()
    };
    host.fail_effect(at, FaultMode::CrashAfter);
    assert!(start_with(&host, &[definition()]).is_err());
    let host = host.restart_process();
    assert_eq!(refusal(&start(&host)), None);
    let fills = host.effect_log().into_iter().filter(is_fill);
    assert_eq!(fills.count(), 1);
    assert_eq!(host.violations(), Vec::<String>::new());
}
