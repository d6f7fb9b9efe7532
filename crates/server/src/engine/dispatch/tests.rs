//! The queue alone.

use super::super::route::{Held, Key};
use super::super::tiers::{Computing, Identity};
use super::super::{Outputs, Work, replies};
use super::*;

/// Jobs named by their first token.
fn job(key: usize, name: u32) -> (Job, Outputs) {
    let (mut all, outputs) = replies(1);
    let job = Job {
        model: 0,
        adapter: None,
        key,
        work: Work::Score {
            ids: vec![name],
            n_top: 0,
        },
        receipt: false,
        reply: all.remove(0),
    };
    (job, outputs)
}

fn of(model: usize, name: u32) -> (Job, Outputs) {
    let (job, outputs) = job(0, name);
    (Job { model, ..job }, outputs)
}

fn dispatch(n: usize, parallel: usize) -> Dispatch {
    let devices = vec![String::new(); n];
    let options = EngineOptions {
        parallel,
        queue: 100,
        cache_bytes: 0,
        host_bytes: 0,
        chunk: 1,
        chunk_beside: 1,
        models_bytes: None,
        models_idle: None,
    };
    let metrics = Arc::new(Metrics::new(&devices, 0));
    let dispatch = Dispatch::new(devices, options, metrics, Arc::new(|_| {}));
    dispatch.add_model("model".to_owned(), 1, false);
    dispatch.finish_load(0, Ok(()));
    dispatch
}

fn names(given: &[Given]) -> Vec<u32> {
    let name = |given: &Given| match &given.job.work {
        Work::Score { ids, .. } => ids[0],
        _ => panic!("another job"),
    };
    given.iter().map(name).collect()
}

/// What an engine reports that has these.
fn report(given: &[Given]) -> Report {
    Report {
        busy: given.iter().map(|given| given.busy.clone()).collect(),
        is_waiting: false,
    }
}

#[test]
fn engines_take_turns_of_keys_when_they_have_room() {
    let dispatch = dispatch(2, 1);
    let asked = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 11), (1, 12)];
    let (jobs, _outputs): (Vec<_>, Vec<_>) =
        asked.iter().map(|(key, name)| job(*key, *name)).unzip();
    dispatch.submit(jobs).unwrap();
    let mut has: Vec<Vec<Given>> = (0..2)
        .map(|number| dispatch.exchange(number, Report::default()).unwrap())
        .collect();
    assert_eq!((names(&has[0]), names(&has[1])), (vec![1], vec![11]));
    // Nothing is handed to who has no room.
    let more = dispatch.exchange(0, report(&has[0])).unwrap();
    assert!(more.is_empty());
    let mut order = Vec::new();
    for number in [1, 1, 0, 1] {
        dispatch.done(number, &has[number][0].busy);
        has[number] = dispatch.exchange(number, Report::default()).unwrap();
        order.extend(names(&has[number]));
    }
    assert_eq!(order, [2, 12, 3, 4]);
}

#[test]
fn what_a_lost_engine_had_comes_before_what_waits() {
    let dispatch = dispatch(2, 1);
    let (jobs, _outputs): (Vec<_>, Vec<_>) =
        [1, 2, 3, 4].map(|name| job(0, name)).into_iter().unzip();
    dispatch.submit(jobs).unwrap();
    let has = dispatch.exchange(0, Report::default()).unwrap();
    assert_eq!(names(&has), [1]);
    let lost = dispatch.exchange(1, Report::default()).unwrap();
    assert_eq!(names(&lost), [2]);
    let jobs = lost.into_iter().map(|given| given.job).collect();
    dispatch.lose(1, jobs, "gone");
    assert!(dispatch.is_well());
    let mut has = has;
    for expected in [2, 3, 4] {
        dispatch.done(0, &has[0].busy);
        has = dispatch.exchange(0, Report::default()).unwrap();
        assert_eq!(names(&has), [expected]);
    }
    // One that was given a job and hasn't looked at it yet.
    let (next, outputs) = job(0, 5);
    dispatch.done(0, &has[0].busy);
    dispatch.submit(vec![next]).unwrap();
    dispatch.lose(0, Vec::new(), "gone too");
    // It waits for one of them to come back, until that is known not to be.
    let mut outputs = outputs;
    assert!(!dispatch.is_well() && dispatch.has_future());
    let never = || Err(Error::new(ErrorCode::Unsupported, "never"));
    dispatch.reopened(1, &never(), Duration::ZERO);
    assert!(outputs.try_recv().is_err() && !dispatch.comes_back(1));
    dispatch.reopened(0, &never(), Duration::ZERO);
    let output = outputs.blocking_recv();
    assert!(
        matches!(&output, Some((0, Output::Failed(error))) if error.to_string() == "never"),
        "{output:?}"
    );
    assert!(!dispatch.has_future());
}

#[test]
fn a_job_that_devices_are_lost_with_is_given_up() {
    let dispatch = dispatch(MAX_LOST_WITH + 1, 1);
    let (first, mut outputs) = job(0, 1);
    dispatch.submit(vec![first]).unwrap();
    for number in 0..MAX_LOST_WITH {
        assert!(outputs.try_recv().is_err());
        let given = dispatch.exchange(number, Report::default()).unwrap();
        assert_eq!(names(&given), [1]);
        dispatch.lose(
            number,
            given.into_iter().map(|given| given.job).collect(),
            "gone",
        );
    }
    assert!(matches!(outputs.try_recv(), Ok((0, Output::Failed(_)))));
    assert!(dispatch.is_well());
}

#[test]
fn a_lost_device_is_opened_again_a_few_times_each_later_than_the_last() {
    let dispatch = dispatch(1, 1);
    dispatch.lose(0, Vec::new(), "gone");
    let failed = || Err(Error::new(ErrorCode::NotFound, "not yet"));
    for n in 1..=MAX_FAILURES {
        let reopen = Some(Errand::Reopen { engine: 0 });
        assert_eq!(dispatch.next_errand(), reopen, "{n}");
        // Nothing else is begun meanwhile.
        assert_eq!(errand(&dispatch), None);
        dispatch.reopened(0, &failed(), Duration::ZERO);
        assert_eq!(dispatch.has_future(), n < MAX_FAILURES, "{n}");
    }
    let delays: Vec<Duration> = (1..=MAX_FAILURES).map(delay).collect();
    assert_eq!(delays[..3], [Duration::ZERO, FIRST_DELAY, 2 * FIRST_DELAY]);
    assert_eq!(delays[6], 32 * FIRST_DELAY);
}

#[test]
fn what_nobody_waits_for_takes_no_place() {
    let dispatch = with_room(1);
    let full = || {
        (0..102)
            .map(|name| job(0, name))
            .unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let (jobs, outputs) = full();
    dispatch.submit(jobs).unwrap();
    let (next, _next) = job(0, 7);
    let refused = dispatch.submit(vec![next]);
    assert!(matches!(refused, Err(Refused::Full { .. })), "{refused:?}");
    drop(outputs);
    let (jobs, _outputs) = full();
    dispatch.submit(jobs).unwrap();
}

/// The queue of an engine with room for `n` models of the four that there are, none of which is loaded.
fn with_room(n: u64) -> Dispatch {
    let devices = vec![String::new()];
    let options = EngineOptions {
        parallel: 2,
        queue: 100,
        cache_bytes: 0,
        host_bytes: 0,
        chunk: 1,
        chunk_beside: 1,
        models_bytes: Some(10 * n),
        models_idle: None,
    };
    let metrics = Arc::new(Metrics::new(&devices, 0));
    let dispatch = Dispatch::new(devices, options, metrics, Arc::new(|_| {}));
    for name in ["a", "b", "c", "d"] {
        dispatch.add_model(name.to_owned(), 10, true);
    }
    dispatch
}

fn errand(dispatch: &Dispatch) -> Option<Errand> {
    let mut state = dispatch.state();
    dispatch.errand(&mut state)
}

const fn evict(number: usize) -> Option<Errand> {
    let reason = Reason::Memory;
    Some(Errand::Unload { number, reason })
}

/// Loads the model `number`, for which there is room.
fn load(dispatch: &Dispatch, number: usize) {
    let engines = vec![0];
    assert_eq!(errand(dispatch), Some(Errand::Load { number, engines }));
    dispatch.held(number);
    dispatch.finish_load(number, Ok(()));
}

#[test]
fn a_model_is_loaded_once_the_memory_is_free() {
    let dispatch = with_room(1);
    assert_eq!(errand(&dispatch), None);
    let mut a = dispatch.want(0, None);
    load(&dispatch, 0);
    assert!(matches!(a.try_recv(), Ok(Ok(()))));
    let mut b = dispatch.want(1, None);
    assert_eq!(errand(&dispatch), evict(0));
    dispatch.finish_unload(0, Reason::Memory);
    // An answer still has it.
    assert_eq!(errand(&dispatch), None);
    assert!(b.try_recv().is_err());
    dispatch.freed(0);
    load(&dispatch, 1);
    assert!(matches!(b.try_recv(), Ok(Ok(()))));
}

#[test]
fn what_is_in_use_begins_nothing_more_and_goes_when_it_has_ended() {
    let dispatch = with_room(2);
    let (jobs, _outputs): (Vec<_>, Vec<_>) = [of(0, 1), of(1, 2)].into_iter().unzip();
    dispatch.submit(jobs).unwrap();
    load(&dispatch, 0);
    load(&dispatch, 1);
    let has = dispatch.exchange(0, Report::default()).unwrap();
    assert_eq!(names(&has), [1, 2]);
    // Another model is waited for; what was used first has to go, and begins nothing more.
    let (more, _more) = of(2, 3);
    let (again, _again) = of(0, 4);
    dispatch.submit(vec![more, again]).unwrap();
    assert_eq!(errand(&dispatch), None);
    dispatch.done(0, &has[1].busy);
    assert!(dispatch.exchange(0, report(&has[..1])).unwrap().is_empty());
    // The other one is idle by now.
    assert_eq!(errand(&dispatch), evict(1));
    dispatch.finish_unload(1, Reason::Memory);
    dispatch.freed(1);
    load(&dispatch, 2);
    // The first one stands in nobody's way any more.
    let given = dispatch.exchange(0, report(&has[..1])).unwrap();
    assert_eq!(names(&given), [4]);
    dispatch.done(0, &given[0].busy);
    let given = dispatch.exchange(0, report(&has[..1])).unwrap();
    assert_eq!(names(&given), [3]);
}

#[test]
fn a_model_that_has_to_go_stays_the_one_although_its_answers_end() {
    let dispatch = with_room(2);
    let (jobs, _outputs): (Vec<_>, Vec<_>) = [of(0, 1), of(1, 2)].into_iter().unzip();
    dispatch.submit(jobs).unwrap();
    load(&dispatch, 0);
    load(&dispatch, 1);
    let has = dispatch.exchange(0, Report::default()).unwrap();
    assert_eq!(names(&has), [1, 2]);
    let more = [of(2, 3), of(0, 4), of(1, 5)];
    let (jobs, _more): (Vec<_>, Vec<_>) = more.into_iter().unzip();
    dispatch.submit(jobs).unwrap();
    assert_eq!(errand(&dispatch), None);
    dispatch.done(0, &has[1].busy);
    let given = dispatch.exchange(0, report(&has[..1])).unwrap();
    assert_eq!(names(&given), [5]);
    dispatch.done(0, &has[0].busy);
    assert_eq!(errand(&dispatch), evict(0));
}

#[test]
fn what_has_to_stay_is_told_to_who_finds_no_room() {
    let dispatch = with_room(2);
    let _pinned = dispatch.want(0, Some(true));
    load(&dispatch, 0);
    let _adapted = dispatch.want(1, None);
    load(&dispatch, 1);
    dispatch.set_adapters(1, 1);
    let mut c = dispatch.want(2, None);
    let (next, mut outputs) = job(0, 7);
    dispatch.submit(vec![Job { model: 3, ..next }]).unwrap();
    assert_eq!(errand(&dispatch), None);
    let error = c.try_recv().unwrap().unwrap_err();
    let message = "the model c has 10 bytes: expected at most 0 beside those that have to stay";
    assert_eq!(error.to_string(), message);
    assert!(matches!(
        outputs.blocking_recv(),
        Some((0, Output::Failed(_)))
    ));
    // Without its adapter it may go.
    dispatch.set_adapters(1, 0);
    let _again = dispatch.want(2, None);
    assert_eq!(errand(&dispatch), evict(1));
}

#[test]
fn a_model_that_is_wanted_no_more_goes_once_it_is_loaded() {
    let dispatch = with_room(1);
    assert!(dispatch.unwant(0).unwrap().try_recv().is_ok());
    let _wanted = dispatch.want(0, Some(true));
    assert!(matches!(
        errand(&dispatch),
        Some(Errand::Load { number: 0, .. })
    ));
    let mut gone = dispatch.unwant(0).unwrap();
    assert_eq!(errand(&dispatch), None);
    dispatch.finish_load(0, Ok(()));
    assert_eq!(dispatch.standing(0).stage, Stage::Loaded);
    let reason = Reason::Request;
    assert_eq!(
        errand(&dispatch),
        Some(Errand::Unload { number: 0, reason })
    );
    dispatch.finish_unload(0, reason);
    assert!(gone.try_recv().is_ok());
    assert_eq!(dispatch.standing(0).stage, Stage::Unloaded);
}

#[test]
fn nothing_is_routed_by_what_a_lost_engine_had() {
    let dispatch = dispatch(1, 1);
    let of = Held::new(0, None);
    let identity = Identity::of(&Computing {
        model: None,
        number: 0,
        generation: 0,
        settings: "",
        device: "",
        has_states: false,
    });
    let key = Key {
        of,
        identity,
        copy: 0,
    };
    dispatch.kept(0).insert(key, 1, &[1, 2, 3], &[3]);
    assert_eq!(dispatch.kept(0).n_common(of, &[1, 2, 4]), 2);
    let before = dispatch.kept(0);
    dispatch.lose(0, Vec::new(), "gone");
    // Even if it is still at it.
    before.insert(key, 2, &[1, 2, 4], &[3]);
    assert_eq!(dispatch.kept(0).n_common(of, &[1, 2, 4]), 0);
}
