"""Two tables that Spark keeps up to date: the messages as they come, and how many there were in each minute.

Nothing is registered here: Spark finds the format `qmq` by itself.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession, functions

spark = SparkSession.active()

COLUMNS = "subject,sequence,message_id,born_at,stored_at,body_bytes"


@dp.table(comment="Every message once: each run reads on where the last one ended")
def messages() -> DataFrame:
    log = spark.readStream.format("qmq").option("path", spark.conf.get("spark.qmq.path"))
    return log.option("columns", COLUMNS).load()


@dp.materialized_view(comment="Messages and bytes by subject and minute")
def flow_minute() -> DataFrame:
    minute = functions.date_trunc("minute", "stored_at").alias("minute")
    return (
        spark.read.table("messages")
        .groupBy("subject", minute)
        .agg(functions.count("*").alias("stored"), functions.sum("body_bytes").alias("bytes"))
    )
