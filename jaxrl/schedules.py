from jaxrl.algos.schedules import *  # noqa
